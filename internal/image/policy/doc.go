// Package policy decides by signatures which images may run. It reads policy.json in the format of containers/image
// (containers-policy.json(5)) and checks an image against the requirements of the most specific scope that contains the
// image's name.
//
//	policy.json ── scopes of the transport "docker", otherwise "default" ──▶ Requirements
//	    reject · insecureAcceptAnything · signedBy (OpenPGP) · sigstoreSigned (a key)
//	                                              │
//	    Check(digests of the image, signatures) ──┴─▶ nil, or ErrRefused with the reason of each requirement
//
// An image passes if every requirement passes. A requirement for signatures passes if one signature was made with one of
// its keys, is about one of the image's digests, and names an image that signedIdentity accepts.
//
// What cannot be checked is refused by name when the file is read: certificates of Fulcio, the log Rekor, and
// signedBaseLayer. Scopes of other transports do not apply, because this node pulls only from registries.
//
// The package must not fetch anything from a registry; its caller brings the signatures. It reads only files of the
// node, and signatures of a lookaside store (Lookaside), which registries.d names.
package policy
