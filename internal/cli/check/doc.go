// Package check implements `tripod check`: can this host run pods, and if not, what is missing?
//
// Wherever possible, a check tries the feature itself in isolation (a mount in a private namespace, rules in a new
// network namespace) instead of trusting a version number. Checks change nothing and leave nothing behind. What only a
// backend can judge (OCI runtime, conmon, cgroups) comes from the backend's own doctor; the caller adds the doctor's
// findings.
package check
