// Package iptables runs the iptables programs. One execution applies several rules, either all or none of them.
//
// It runs the programs instead of using netlink, because other software on a node also runs them. So all rules are in
// the variant (legacy or nft) that the node's owner has chosen. The package knows nothing about the purpose of the
// rules.
package iptables
