// Package host tests the Debian package of Tripod on an ordinary host: a Debian 12 with systemd, cgroup v2 and AppArmor, in
// a machine that QEMU runs (hack/images/host.sh). The tests run outside and order everything by SSH, so they can also
// restart the service and boot the host again.
//
// The machine has a disk "payload", made for each boot, with the package, the programs, the images and the test binaries of
// other packages. What is written to the disks is thrown away when the machine ends.
//
// TRIPOD_TEST_HOST=DIR keeps the machine running after the tests, and the next run with the same DIR uses it again, with
// the package as it is built then. `hack/host.sh ssh DIR` opens a shell in it.
package host
