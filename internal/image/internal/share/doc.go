// Package share exchanges images with the other nodes of a cluster: Serve starts a mirror for them, and Peers resolves images
// at their mirrors.
//
//	another node ── GET, ?ns=REGISTRY ──▶ Mirror ── Images ──▶ what the store has and may be served
//	pull ── Peers.Resolver ──▶ the mirrors that answer first
//
// Peers are not trusted: the receiver checks each digest. A mirror serves content only under names that its configuration
// allows.
//
// The package must not know how images are stored.
package share
