// Package cgroup creates, limits, kills and removes cgroups, on cgroup v1 and v2, below parents that the kubelet names
// or below our own parent. The names of our cgroups begin with Mark. Cgroups with other names are never removed, except
// below ours.
//
//	Open ─► Tree ─┬─ Pod(parent, key)       the path of a pod's cgroup
//	              ├─ Create, Apply          create it, set limits
//	              ├─ Enter                  move the calling thread there, so that its children start there
//	              └─ Kill, Remove, Marked   empty it, remove it, find leftovers
//
// Package stats reads what a cgroup has used. This package must not import stats, and must not know about pods beyond
// their keys. docs/adr/0038-*.md explains which parts containerd/cgroups could replace.
package cgroup
