package main

import (
	"context"
	"strings"
	"testing"
)

// TestNodeWithoutOCIRuntime: a node without crun and runc serves its other handlers, and says why there is no handler
// "linux". If the configuration names an OCI runtime, or a default handler that is missing, the node does not start.
func TestNodeWithoutOCIRuntime(t *testing.T) {
	c := fakeNode(t)
	t.Setenv("PATH", t.TempDir())
	c.Backends.Linux, c.Node.DefaultHandler = true, "linux"
	const reason = "neither crun nor runc is in PATH"

	stop := startUntil(t, c, "ps")
	must(t, c, "run", testImage, "-r", "fake", "--host-network", "--name", "one", "--log-dir", t.TempDir())
	for _, handler := range []string{"", "linux", "runc"} {
		fails(t, c, 1, reason, "run", testImage, "-r", handler, "--host-network", "--log-dir", t.TempDir())
	}
	fails(t, c, 1, "no runtime for handler", "run", testImage, "-r", "nothing", "--host-network", "--log-dir", t.TempDir())
	_, info, _ := tripod(c, "", "info")
	if !strings.Contains(info, "NotInstalled") || !strings.Contains(info, reason) {
		t.Errorf("info: got\n%s\nwant the reason for the missing handler", info)
	}
	for line := range strings.Lines(info) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == "RuntimeReady" && fields[1] != "true" {
			t.Errorf("info: got %q, want that the runtime is ready", line)
		}
	}
	must(t, c, "rmp", "-f", "one")
	if err := stop(); err != nil {
		t.Error(err)
	}

	c.Backends.Linux = false
	stop = startUntil(t, c, "ps")
	fails(t, c, 1, "backends.linux is off", "run", testImage, "--host-network", "--log-dir", t.TempDir())
	if _, info, _ := tripod(c, "", "info"); strings.Contains(info, "NotInstalled") {
		t.Errorf("info of a node with backends.linux off: got\n%s\nwant no problem", info)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}

	refuses := func(want string) {
		t.Helper()
		if err := runDaemon(context.Background(), c, quiet); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the daemon ended with %v, want an error with %q", err, want)
		}
	}
	c.Node.DefaultHandler = "vm"
	refuses(`no enabled backend serves the handler "vm"`)
	c.Node.DefaultHandler = "linus"
	refuses(`no enabled backend serves the handler "linus"`)
	c.Backends.Linux, c.Node.DefaultHandler, c.Linux.Runtime = true, "linux", "crun"
	refuses("no OCI runtime works here")
}
