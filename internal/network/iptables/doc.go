// Package iptables runs the iptables programs. One execution applies several rules, either all or none of them.
//
// It does not use netlink, because the other software on a node uses these programs too, in the variant (legacy or nft)
// that the node's owner has chosen. The package knows nothing about the purpose of the rules.
package iptables
