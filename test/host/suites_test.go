package host

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// TestConformance: the public suite of the CRI against the service. The lines that fail are named with the reason.
func TestConformance(t *testing.T) {
	t.Cleanup(func() { _, _ = node.try(t, "tripod rmp --all --force") })
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	out, err := node.command(ctx,
		`printf '#!/bin/sh\nexec "$@"\n' >/usr/local/bin/sudo; chmod 755 /usr/local/bin/sudo; cd /root && /payload/critest --runtime-endpoint unix:///run/tripod/tripod.sock --test-images-file /payload/build/images/images.yaml --ginkgo.no-color`+focus(), nil)
	keep(t, "critest.txt", out)
	known := map[string]string{
		"[k8s.io] Image Manager [It] public image with digest should be pulled and removed [Conformance] [Serial]": "the digest is that of the image in the public registry, and no registry is reachable",
	}
	failed := regexp.MustCompile(`(?m)^ *\[FAIL\] (.*)$`).FindAllStringSubmatch(out, -1)
	for _, f := range failed {
		if known[f[1]] == "" {
			t.Error(f[1])
		}
	}
	summary := regexp.MustCompile(`(?m)^Ran .*\n.*$`).FindString(out)
	t.Log(summary)
	if err != nil && len(failed) == 0 {
		t.Errorf("critest: %v", err)
	}
}

// linuxPods are the state table, with crun and runc, and the end-to-end tests of Linux pods that need neither a Go toolchain nor
// a second machine.
const linuxPods = "^(TestContainerOperations|TestIdempotence|TestExit|TestProcess|TestLogs|TestNetworking|TestUsers|TestCapabilities|TestSeccomp|TestExecSync|TestFigures|TestTop|TestResources|TestAppArmor|TestMounts|TestUserNamespaces|TestStreaming|TestSuite$)"

// TestEndToEnd runs end-to-end tests of Linux pods with a daemon of their own, in namespaces of their own, on cgroup v2.
func TestEndToEnd(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Hour)
	defer cancel()
	node.run(t, "systemctl stop tripod")
	t.Cleanup(func() { node.run(t, "systemctl start tripod") })
	out, err := node.command(ctx,
		fmt.Sprintf(`cd /payload/test/e2e && b=/payload/build && export TRIPOD_TEST_FULL=1 TRIPOD_BIN=$b/bin/tripod TRIPOD_TEST_BIN=$b/test/bin/tripod \
	TRIPOD_WASM_BIN=$b/bin/tripod-wasm TRIPOD_AGENT_BIN=$b/bin/tripod-agent TRIPOD_VMWRAP_BIN=$b/bin/tripod-vmwrap; /payload/e2e.test -test.v -test.timeout 2h -test.run '%s'`, run()), nil)
	keep(t, "e2e.txt", out)
	if err != nil {
		t.Errorf("%v", tail(out, 200))
	}
}

// run returns the pattern of the end-to-end tests: TRIPOD_TEST_HOST_RUN, or all of them.
func run() string {
	if pattern := os.Getenv("TRIPOD_TEST_HOST_RUN"); pattern != "" {
		return pattern
	}
	return linuxPods
}

// focus returns the argument that selects lines of critest: those that TRIPOD_TEST_HOST_RUN matches.
func focus() string {
	if pattern := os.Getenv("TRIPOD_TEST_HOST_RUN"); pattern != "" {
		return " --ginkgo.focus '" + pattern + "'"
	}
	return ""
}

// keep writes a suite's output to build/test/host.
func keep(t *testing.T, name, text string) {
	t.Helper()
	dir := filepath.Join("..", "..", "build", "test", "host")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// tail returns the last lines of a text.
func tail(text string, lines int) string {
	all := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
