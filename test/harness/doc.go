// Package harness supports the end-to-end and crash tests. It runs a real daemon in namespaces of its own (package
// testns), talks to it as a kubelet does, and checks afterwards that nothing is left behind.
//
// It uses the daemon as a user does: through the command line, the configuration file and the CRI. It must not import
// the daemon's packages.
//
//	func TestMain(m *testing.M) { harness.Main(m) }       // enters the namespaces, see testns
//
//	func TestLogs(t *testing.T) {
//		d := harness.StartDaemon(t)                       // checked for leaks when the test ends
//		pod := d.RunPod(t, harness.PodConfig(t, "web"))
//		c := pod.Run(harness.ContainerConfig("c", harness.Busybox, harness.Command("echo", "hello")))
//		c.WaitExit(0)
//		...harness.Text(c.Logs(), "stdout")...
//	}
//
//	go test process ──▶ testns: netns, mounts, PIDs, /run, cgroup parent ──▶ the same test binary
//	                                                                          │ starts
//	                                       docker-registry 127.0.0.1 ◀────────┤ (once, a copy of build/images/registry)
//	                                       tripod daemon /run/tN ◀────────────┘ (per StartDaemon)
//
// Tests that start a daemon must not call t.Parallel, because the leak check covers the whole namespaces.
package harness
