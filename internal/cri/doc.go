// Package cri is the Kubernetes front door: the RuntimeService and ImageService of CRI v1 on one gRPC server.
//
// It translates. A request is validated, turned into one operation of the node or of the image store, and the answer
// or the error is turned back. There is one file per RPC, named after what it does: RunPodSandbox is in
// sandbox_run.go, PullImage in image_pull.go.
//
//	kubelet · crictl · critest
//	      │ unix socket of the daemon
//	┌─────▼──────────────────────────────────────┐
//	│ interceptors: panic → Internal, error →    │   errors.go, the only place with gRPC codes
//	│ code, faults of ours logged                │
//	├────────────────────────────────────────────┤
//	│ validation: the request alone              │   validate*.go
//	├────────────────────────────────────────────┤
//	│ one file per RPC                           │   sandbox_*.go container_*.go image_*.go …
//	├────────────────────────────────────────────┤
//	│ snapshots → messages, encoded once         │   convert*.go wire.go
//	└───┬──────────────────┬─────────────────┬───┘
//	    ▼                  ▼                 ▼
//	internal/node    internal/image   internal/stream
//
// The package keeps no state but a memo of encoded list items: List and Status calls read the node's immutable snapshots, take no lock and ask no
// backend. It never imports a backend; what a backend cannot honour the backend refuses, and what only the request
// can tell (a missing field, a negative timeout, a path that leaves its directory) is refused here.
//
// The messages are those of k8s.io/cri-api v0.37; docs/adr/0002-cri-messages-are-the-spec-language.md says why they are
// the language of the whole house, docs/adr/0003-errdefs-is-the-error-vocabulary.md how errors travel.
package cri
