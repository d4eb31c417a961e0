// Package cri is the Kubernetes front door: the RuntimeService and ImageService of CRI v1 on one gRPC server.
//
// Each request is validated and becomes one operation of the node or of the image store; the result or error is
// translated back. There is one file per RPC, named after its effect: RunPodSandbox is in sandbox_run.go, PullImage in
// image_pull.go.
//
//	kubelet · crictl · critest
//	      │ unix socket of the daemon
//	┌─────▼──────────────────────────────────────┐
//	│ interceptors: panic → Internal, error →    │   errors.go, the only place with gRPC codes
//	│ code, log the node's own faults            │
//	├────────────────────────────────────────────┤
//	│ delegates: other CRI endpoints get calls   │   delegate, only if configured
//	│ about their pods                           │
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
// List and Status calls read the node's immutable snapshots and ask no backend. The package's only state is a cache of
// encoded list items. The package must not import a backend. It rejects requests that no backend could execute (a
// missing field, a negative timeout, a path that leaves its directory). Each backend rejects requests that it does not
// support.
//
// The messages are defined in k8s.io/cri-api v0.37. docs/adr/0002-cri-messages-are-the-spec-language.md explains why
// the whole program uses them, and docs/adr/0003-errdefs-is-the-error-vocabulary.md explains the errors.
//
// # Subpackages
//
//	delegate   forwards calls to other CRI endpoints, which stand behind Tripod on the same node
package cri
