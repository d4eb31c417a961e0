// Package attack is those who mean harm, from outside: a container, a component, a machine, an image, a registry, an MQTT
// client, a streaming client. Each has a file, a daemon, and cases that it tries again and again for two seconds. Beside
// them are neighbours, one pod of each kind and a client of the CRI, who are asked all the time. After each case
//
//   - a new pod of each kind starts and does its work;
//   - no call of a neighbour has failed, and with TRIPOD_TEST_FULL=1 their 99th percentile has risen by less
//     than half and what a busy machine does to everybody;
//   - nothing is left: processes, mounts, cgroups, interfaces, addresses, files that the daemon and its workers have open.
//
// The table of [SECURITY.md] names the cases of each of its rows.
//
// [SECURITY.md]: ../../SECURITY.md
package attack
