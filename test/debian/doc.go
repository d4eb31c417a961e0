// Package debian boots a real Debian with systemd and cloud-init as a machine, from an image that hack/images/debian.sh
// builds. Inside the guest, it checks how cloud-init has applied the pod's configuration. It does so for both
// cloud-init data sources.
//
// Debian's PostgreSQL and Redis, which hack/images/databases.sh unpacks, run in a machine with the tests' own guest.
//
// The tests take minutes and are part of `make test-all`.
package debian
