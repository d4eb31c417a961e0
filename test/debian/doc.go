// Package debian boots a real Debian with systemd and cloud-init as a machine, from an image that hack/images/debian.sh makes,
// and looks in the guest at what cloud-init made of what it was told, in both of its forms.
//
// Debian's PostgreSQL and Redis, which hack/images/databases.sh unpacks, run in a machine of the tests' own guest.
//
// It needs minutes, and is a part of `make test-all`.
package debian
