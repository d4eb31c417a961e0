// Package sandbox is the contract between the node and what isolates a pod.
//
// The node owns every state and transition; a backend owns effects. A backend carries out orders and reports what ended by
// itself. It never decides on a pod's state.
//
//	internal/node ──orders──▶ sandbox.Backend ──effects──▶ processes, mounts, cgroups, machines
//	      ▲                        │
//	      └────────Sink(Event)─────┘
//
// Three rules make recovery possible:
//
//   - Every effect can be found by the IDs of the pod and the container, so that a daemon that knows only the intent can
//     remove a half-made thing.
//   - Every order is idempotent: repeated after a crash it completes what was begun, and removing a missing thing succeeds.
//   - What runs outlives the daemon, and Recover finds it.
//
// Pods and containers are described by the messages of CRI v1 (k8s.io/cri-api) that the control plane sent
// (docs/adr/0002-cri-messages-are-the-spec-language.md). Errors are those of github.com/containerd/errdefs
// (docs/adr/0003-errdefs-is-the-error-vocabulary.md).
//
// Backends live below this package (internal/sandbox/linux, …/vm, …/wasm). They never import each other or a control plane.
// What they share is below it, too: internal/sandbox/ledger keeps their containers, internal/sandbox/fields checks fields of
// the CRI. Example is a whole backend in two hundred lines.
package sandbox
