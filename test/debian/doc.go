// Package debian boots a real Debian with systemd and cloud-init as a machine, from an image that hack/images/debian.sh
// builds. It checks in the guest how cloud-init applied the pod's configuration, for both cloud-init data sources.
//
// Debian's PostgreSQL and Redis, which hack/images/databases.sh unpacks, run in a machine with the tests' own guest.
//
// The tests take minutes and are part of `make test-all`.
package debian
