// Package stats reads a cgroup's usage, on cgroup v1 and v2, and converts it to the messages of the CRI: CPU, memory,
// swap, number of processes, pressure.
//
//	Read("/kubepods/pod1/abc") ──► Figures ──► CPUUsage, MemoryUsage, SwapUsage, IOUsage, ProcessUsage
//	                                  │
//	                                  └──────► Sampler: the rate between two samples ──► UsageNanoCores
//
//	ReadAll("/kubepods/pod1/abc") ──► Samples: a value for each Family that the kernel counts, by cAdvisor's names
//
// The package keeps no descriptors, caches or goroutines. Only a Sampler keeps state, of limited size. Figures that the
// kernel does not offer are nil or zero, never estimated. Figures include child cgroups. They have the same definitions
// as cAdvisor's figures, because the kubelet compares the two.
//
// The package must not know about pods, containers or backends. Begin reading at read.go. docs/adr/0038-*.md says why
// this package parses the files itself.
package stats
