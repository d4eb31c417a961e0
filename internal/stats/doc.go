// Package stats reads what a cgroup used: CPU, memory, swap, block I/O, processes and pressure, on cgroup v1 and
// v2 alike, and puts it into the messages of the CRI.
//
//	Detect ─► Root (v1: one tree per controller; v2: one tree)
//	            │ Open("/kubepods/pod1/abc")
//	            ▼
//	          Cgroup ──Read──► Figures ──► CpuUsage, MemoryUsage, SwapUsage, IoUsage, ProcessUsage
//	            │                 │
//	            └─OOMKills        └──► Sampler: usage of two moments ──► UsageNanoCores
//
// It reads files and keeps no descriptor, no cache and no goroutine; the one thing that has a memory is Sampler,
// which is bounded. A figure that the kernel does not offer is absent (nil or zero), never guessed.
//
// What the figures mean follows cAdvisor, because that is what the kubelet compares them with: the working set is
// the usage less the inactive file cache, the RSS is anonymous memory, and figures include those of child cgroups.
//
// The package must not know pods, containers or backends: it is given a path and answers with numbers.
package stats
