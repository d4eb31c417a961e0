package connect

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tripod-run/tripod/test/harness"
)

func TestMain(m *testing.M) {
	if os.Getenv(envSocket) == "" {
		harness.Main(m)
		return
	}
	if err := serve(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// runTime limits a run of the suite, which takes two minutes on an idle machine.
const runTime = 30 * time.Minute

// minCases is the least number of cases that the runner must derive from config.yaml.
const minCases = 4500

// heading is the heading of the list of known failures in docs/conformance.md. The list ends at the next heading.
const heading = "### Known failures of the Connect suite\n"

// knownFailures returns the patterns in the list, which is a table of patterns in the runner's syntax, and reasons.
func knownFailures(t *testing.T) (patterns []string) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(harness.Root(), "docs", "conformance.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, list, found := strings.Cut(string(data), "\n"+heading)
	if !found {
		t.Fatalf("docs/conformance.md has no heading %q", heading)
	}
	list, _, _ = strings.Cut(list, "\n#")
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\| (.+) \\|$").FindAllStringSubmatch(list, -1) {
		patterns = append(patterns, row[1])
	}
	return patterns
}

// output runs a command in a directory of the repository and returns its output.
func output(t *testing.T, dir string, argv ...string) string {
	t.Helper()
	c := exec.Command(argv[0], argv[1:]...)
	c.Dir = filepath.Join(harness.Root(), dir)
	out, err := c.Output()
	if err != nil {
		t.Fatalf("%q: %v", argv, err)
	}
	return strings.TrimSpace(string(out))
}

// push pushes an image and returns its name.
func push(t *testing.T, name, source string, more ...string) string {
	t.Helper()
	bin, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	args := append([]string{"push", "--plain-http", filepath.Join(harness.Root(), source), harness.Registry(t).Addr + "/" + name}, more...)
	if out, err := exec.Command(bin, args...).CombinedOutput(); err != nil {
		t.Fatalf("tripod push: %v: %s", err, out)
	}
	return harness.ImagePrefix + name
}

// guests are the servers for the conformance suite: a typed component, with the suite's service.proto, and a Go server.
var guests = map[string]func(t *testing.T) (image string){
	"JavaScript": func(t *testing.T) string {
		protos := filepath.Join(output(t, "hack/connect", "go", "list", "-m", "-f", "{{.Dir}}", "connectrpc.com/conformance"), "proto")
		return push(t, "tripod/wasm/conformance-js:1", "examples/wasm/conformance-js/conformance-js.wasm",
			"-I", protos, "--proto", filepath.Join(protos, "connectrpc/conformance/v1/service.proto"))
	},
	"Go": func(t *testing.T) string { return push(t, "tripod/wasm/conformance-go:1", "test/guests/conformance") },
}

// TestConformance runs the suite. The runner fails if a case outside the list fails, or if a case in the list passes.
func TestConformance(t *testing.T) {
	for name, image := range guests {
		t.Run(name, func(t *testing.T) { conform(t, image(t)) })
	}
}

func conform(t *testing.T, image string) {
	runner := filepath.Join(harness.Root(), "build/tools/connectconformance")
	if _, err := os.Stat(runner); err != nil {
		t.Fatalf("%v; make test-connect builds it", err)
	}
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	// The first pod waits until the guest is compiled, which can take longer than the runner waits for a server.
	d.RunWasm(t, &harness.PodSpec{Image: image})
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"--mode", "server", "--conf", filepath.Join(harness.Root(), "test/connect/config.yaml")}
	for _, pattern := range knownFailures(t) {
		args = append(args, "--known-failing", pattern)
	}
	if only := os.Getenv("TRIPOD_CONNECT_RUN"); only != "" {
		args = append(args, "--run", only, "-v", "--trace")
	}
	ctx, cancel := context.WithTimeout(t.Context(), runTime)
	defer cancel()
	c := exec.CommandContext(ctx, runner, append(args, "--", self)...)
	c.Env = append(os.Environ(), envSocket+"="+d.Socket, envImage+"="+image, envDir+"="+t.TempDir())
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("run the suite: %v\n%s", err, out)
	}
	summary := regexp.MustCompile(`(?m)^Total cases: (\d+)$`).FindSubmatch(out)
	if summary == nil {
		t.Fatalf("the runner's output has no number of cases:\n%s", out)
	}
	if n, _ := strconv.Atoi(string(summary[1])); n < minCases && os.Getenv("TRIPOD_CONNECT_RUN") == "" {
		t.Errorf("cases run: got %d, want at least %d", n, minCases)
	}
	t.Logf("%s", out)
}
