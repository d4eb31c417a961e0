// Package machinetest is the test suite for every machine.Driver. It runs real guests.
//
//	machinetest.Run(t, machinetest.Subject{New: …, Guest: …, NewCgroup: …})
//
// The suite needs root and its own namespaces (hack/testns.sh). It must not depend on how a driver works: it checks
// only what it can see from the interface, the guest's console, the machine's process and the cgroup.
package machinetest
