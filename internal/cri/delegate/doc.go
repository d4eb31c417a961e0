// Package delegate forwards CRI calls to other CRI endpoints, such as containerd or CRI-O, which stand behind Tripod on
// the same node. A delegate owns the pods of some RuntimeClass handlers, of pods with some annotations, and the images
// with some prefixes. Each call about one of them is forwarded whole, with its message and its IDs unchanged.
//
//	gRPC server of internal/cri
//	      │ every call passes Router.Unary or Router.Stream
//	┌─────▼───────────────────────────────────────────────┐
//	│ which endpoint?  request: route.go · ID: owners.go  │── record: ID → endpoint
//	├──────────────┬──────────────────────┬───────────────┤
//	│ one endpoint │ all endpoints        │ this node     │
//	│ forward.go   │ list.go status.go …  │ the handler   │
//	└──────┬───────┴──────────┬───────────┴───────┬───────┘
//	       ▼                  ▼                   ▼
//	   endpoint.go: connection, breaker,      internal/cri
//	   last snapshots
//
// Calls about this node's own pods never wait for a delegate. An endpoint that does not answer a read within its
// timeout is away: from then on its calls fail at once, until a probe in the background gets an answer. While an
// endpoint is away, lists contain its last snapshot. If that is missing, too old or older than the last creation, lists
// fail; they never omit pods that may be running.
//
// The package must not know a backend, and it keeps no state of pods except who owns them. Begin with router.go.
package delegate
