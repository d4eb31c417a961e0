// Package cgroup makes, limits, kills and removes cgroups, on cgroup v1 and v2, below the parents that a kubelet names or below
// our own. The names of our cgroups begin with Mark, and no other is ever removed.
//
//	Open ─► Tree ─┬─ Pod(parent, key)       where a pod's cgroup is
//	              ├─ Create, Apply          make it, set limits
//	              ├─ Enter                  move the calling thread there, so that its children start there
//	              └─ Kill, Remove, Marked   empty it, remove it, find leftovers
//
// Package stats reads what a cgroup has used. This package must not know pods beyond their keys, nor import stats;
// docs/adr/0038-*.md says what containerd/cgroups does of this and what it cannot.
package cgroup
