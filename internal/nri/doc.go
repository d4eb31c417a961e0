// Package nri connects plugins that speak the Node Resource Interface (https://github.com/containerd/nri) to the node.
// Plugins follow the life of all pods, adjust containers before they are made, and change the resources of others.
//
//	internal/node ── node.Hooks ──▶ Plugins ── github.com/containerd/nri/pkg/adaptation ──▶ plugins
//	      ▲                           │            (sockets, timeouts, order of plugins,
//	      └── UpdateForPlugin ────────┘             conflicts between adjustments)
//
// The package knows no kind of pod. An adjustment that the CRI can express changes the container's configuration, and
// the kind's own validation decides about it, as it does about a request. All other adjustments are for backends whose
// containers have an OCI specification (sandbox.Specifier).
//
// Begin with hooks.go, which implements node.Hooks, and then read sync.go.
package nri
