// Package cgroup creates, limits, kills and removes cgroups, on cgroup v1 and v2, below our own parent cgroup or below
// one that the kubelet has chosen. The names of our cgroups begin with Mark. A cgroup with another name is never
// removed, unless it is below one of ours.
//
//	Open ─► Tree ─┬─ Pod(parent, key)       the path of a pod's cgroup
//	              ├─ Create, Apply          create it, set limits
//	              ├─ Start, Enter, Join     start processes there, or move them
//	              ├─ Kill, Remove, Names    empty it, remove it, find leftovers
//	              └─ Helpers                where processes live that serve pods and outlive the daemon
//
// With the systemd driver on v2, scopes and slices are units, which only systemd makes, limits and removes (systemd.go,
// docs/adr/0073-*.md).
//
// Package stats reads what a cgroup has used. This package must not import stats, and must not know about pods beyond
// their keys. docs/adr/0038-*.md explains which parts containerd/cgroups could replace.
package cgroup
