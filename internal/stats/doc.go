// Package stats reads what a cgroup has used, on cgroup v1 and v2, and puts it into the messages of the CRI: CPU, memory,
// swap, number of processes, pressure.
//
//	Read("/kubepods/pod1/abc") ──► Figures ──► CPUUsage, MemoryUsage, SwapUsage, IOUsage, ProcessUsage
//	                                  │
//	                                  └──────► Sampler: the rate between two samples ──► UsageNanoCores
//
// It holds no descriptor, no cache and no goroutine; only a Sampler remembers anything, up to a bound. A figure that the
// kernel does not offer is absent (nil or zero), never estimated. Figures mean what they mean in cAdvisor, because the
// kubelet compares them with cAdvisor's, and include those of child cgroups.
//
// The package must not know pods, containers or backends. Begin reading at read.go; docs/adr/0038-*.md says why the files
// are parsed here.
package stats
