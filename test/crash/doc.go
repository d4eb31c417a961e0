// Package crash kills a real daemon and its helpers while containers run, and checks that the next daemon's record
// agrees with the containers. Its tests are named after rows in the tables of faults that a node must survive
// (docs/faults.md).
//
// The tests of internal/node visit the node's fail points with the fake backend. The tests here check the real effects:
// namespaces, mounts, cgroups, processes, leases, snapshots.
package crash
