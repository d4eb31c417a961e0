// Package resources computes what machines get of the node: CPUs, memory and the limits of their cgroups. Begin with Cgroups and
// Growth.
//
// The package must not know about pods, drivers or guests: it takes the resources of a container as the CRI has them, and
// numbers.
package resources
