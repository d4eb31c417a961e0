// Package egress is how component pods call out: which connections a pod may open (Rules), and the protocol by which
// a worker asks the node's dialer for them (Client).
//
//	daemon ──Order: rules, DNS, netns, one end of a socket pair──► dialer (package dialer)
//	  └─────PodSpec: the other end────────► worker                   ▲   │
//	                                          └─Client──Request──────┘   │ a connected socket (SCM_RIGHTS)
//	                                                 ◄───────────Reply───┘
//
// A worker has no network of its own, and may not call socket or connect. So the dialer opens each connection inside
// the network namespace of the pod, after it has compared the resolved address with the pod's rules. The socket pair
// stands for the pod: a worker cannot name a pod whose end it does not hold, and cannot change the rules.
//
// Both connections carry frames of internal/fdpass. The package opens no socket by itself, and is pure Go.
package egress
