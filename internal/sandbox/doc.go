// Package sandbox defines the contract between the node and the backends that isolate pods.
//
// The node owns every state and transition; a backend owns effects. A backend carries out orders, and reports
// containers that end on their own. It never decides a pod's state.
//
//	internal/node ──orders──▶ sandbox.Backend ──effects──▶ processes, mounts, cgroups, machines
//	      ▲                        │
//	      └────────Sink(Event)─────┘
//
// Three rules make recovery possible:
//
//   - Every effect can be found by the IDs of the pod and the container. So a daemon that knows only what was intended can
//     remove an unfinished effect.
//   - Every order is idempotent. An order that is repeated after a crash completes the unfinished work. If there is
//     nothing to remove, a removal succeeds.
//   - Containers outlive the daemon, and Recover finds them.
//
// Pods and containers are described by the messages of CRI v1 (k8s.io/cri-api) that the control plane sent
// (docs/adr/0002-cri-messages-are-the-spec-language.md). Errors are those of github.com/containerd/errdefs
// (docs/adr/0003-errdefs-is-the-error-vocabulary.md).
//
// Backends live below this package, share ledger and fields, and never import each other or a control plane. The package's
// Example is a complete backend in two hundred lines.
//
// # Subpackages
//
//	linux    pods of OCI containers, by crun or runc and conmon
//	vm       machines as containers, and containers in machines
//	wasm     WebAssembly components
//	ledger   keeps track of the containers of one kind
//	fields   checks the CRI fields that mean the same for every kind
package sandbox
