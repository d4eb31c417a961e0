// Package crash kills a real daemon, and its helpers, under real containers, and holds the record of the daemon that
// comes after against what is there. Its tests are named after the rows N1, N2, N4 and N8 of the faults that a node must
// survive (docs/testing.md).
//
// The matrix over the node's own fail points with the fake backend is in internal/node; here are the real effects:
// namespaces, mounts, cgroups, processes, leases, snapshots.
package crash
