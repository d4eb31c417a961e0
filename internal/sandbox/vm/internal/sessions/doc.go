// Package sessions serves exec, attach and port-forward of machines in a session carrier, which outlives the daemon. Begin with
// Server. The daemon makes a Plan for each session; it also uses the ways to a guest and its screen for sessions of its own.
//
// The package must not know pods or the backend: a Plan has all that a session needs to know about its machine.
package sessions
