// Package deb installs, upgrades, removes and purges the Debian package that hack/deb.sh builds, with the host's dpkg,
// in a copy of the host's file system that keeps its changes in memory. Systemd does not run there, so the test starts
// the daemon itself.
//
// `make test-release` builds the package and runs the test, as does `make test-all`.
package deb
