// Package attack simulates attackers: a container, a component, a machine, an image, a registry, an MQTT client and a
// streaming client. Each attacker has its own source file, its own daemon, and cases. Each case is repeated for two
// seconds. Meanwhile the attacker's neighbours (one pod of each kind and a CRI client) are used continuously. After
// each case
//
//   - a new pod of each kind starts and works;
//   - no call to a neighbour has failed, and with TRIPOD_TEST_FULL=1 the 99th percentile of each neighbour's latency has
//     risen by less than half, apart from the noise of a busy machine;
//   - nothing is left: processes, mounts, cgroups, interfaces, addresses, open files of the daemon and its workers.
//
// Each row of the table in [SECURITY.md] names its cases.
//
// [SECURITY.md]: ../../SECURITY.md
package attack
