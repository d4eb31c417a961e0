// Package check owns what `tripod check` finds out about a host: whether it can run pods, and what to do where it
// cannot.
//
// Each finding is made by doing the thing in a corner of its own (a mount in a private namespace, rules in a new
// network namespace) wherever that is possible, not by believing a version number. It must leave nothing behind and
// change nothing. What only a backend can judge (OCI runtime, conmon, cgroups) comes from the backend's own doctor
// and is added by the caller.
package check
