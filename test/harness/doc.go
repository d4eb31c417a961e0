// Package harness is the ground that the end-to-end and crash tests stand on: it runs a real daemon in a
// world of its own, talks to it as a kubelet does, and looks afterwards whether anything was left behind.
//
// It knows the daemon as a user does: its command line, its configuration file and the CRI. It must not import the
// daemon's packages.
//
//	func TestMain(m *testing.M) { harness.Main(m) }       // enters namespaces of its own, see testns
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
// Tests that have a daemon of their own do not call t.Parallel: the leak check looks at everything in the world.
package harness
