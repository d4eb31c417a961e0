// Package iptables runs the iptables programs: several rules in one execution, which either all hold or none.
//
// Programs, not netlink: they are what everybody else on a node uses, in whichever of their two variants the node's
// owner has chosen. It knows nothing of what the rules are for.
package iptables
