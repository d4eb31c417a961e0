// Package machinetest holds drivers of machines to machine.Driver with real guests: one suite for all of them.
//
//	machinetest.Run(t, machinetest.Subject{New: …, Guest: …, NewCgroup: …})
//
// It needs a world of its own (hack/testns.sh) and root. It must not know how a driver does its work: what it sees of a
// machine is what the interface, the guest's console, its process and its cgroup show.
package machinetest
