// Package cgroup makes, limits, empties and removes cgroups, on cgroup v1 and v2, below the parents that a kubelet names or
// below our own. Names of ours begin with Mark, so that nothing else is ever removed.
//
//	Open ─► Tree ─┬─ Pod(parent, key)       where a pod's cgroup is
//	              ├─ Make, Apply            make it, set limits
//	              ├─ Enter                  move the calling thread there: its children are born in it
//	              └─ Kill, Remove, Marked   take it away, find what is left
//
// What a cgroup has used is for package stats to read. The package must not know pods beyond their keys.
package cgroup
