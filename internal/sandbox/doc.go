// Package sandbox is the contract between the node and whatever isolates a pod.
//
// The node owns every state and every transition; a backend owns effects. A backend is told what to make,
// makes it, and reports what ended by itself. It never decides that a pod is in another state.
//
//	internal/node ──orders──▶ sandbox.Backend ──effects──▶ processes, mounts, cgroups, machines
//	      ▲                        │
//	      └────────Sink(Event)─────┘
//
// Three rules make recovery possible:
//
//   - Every effect can be found from the pod's and the container's ID alone, so that a half-made thing can be
//     removed by a daemon that remembers nothing but the intent.
//   - Every order is idempotent: repeated after a crash it finishes what was begun, and removing what is not
//     there succeeds.
//   - What runs outlives the daemon; Recover finds it again.
//
// The specification language is CRI v1 itself (k8s.io/cri-api): a Pod and a Container carry the messages the
// control plane sent (docs/adr/0002-cri-messages-are-the-spec-language.md). Errors are those of
// github.com/containerd/errdefs (docs/adr/0003-errdefs-is-the-error-vocabulary.md).
//
// Backends live below this package, the one for tests in test/fake. They never import each other or a control plane.
package sandbox
