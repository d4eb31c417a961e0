package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/tripod-run/tripod/test/harness"
)

var (
	guideBlock = regexp.MustCompile("(?s)```console\n(.*?)```")
	digits     = regexp.MustCompile(`[0-9]+`)
)

// TestEdgeGuide types the commands of docs/edge.md, "Two modules in five minutes", as they stand, and looks for the output
// that the guide shows. Only directories differ, and the harness starts the daemon.
func TestEdgeGuide(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(root, "docs", "edge.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, guide, _ := strings.Cut(string(text), "\n## Two modules in five minutes\n")
	guide, _, _ = strings.Cut(guide, "\n## ")
	modules := filepath.Join(t.TempDir(), "modules")
	paths := strings.NewReplacer("/var/lib/tripod-modules", modules, "/tmp/edge.toml", filepath.Join(t.TempDir(), "edge.toml"))
	blocks := guideBlock.FindAllStringSubmatch(paths.Replace(guide), -1)
	if len(blocks) != 3 {
		t.Fatalf("the guide has %d blocks of commands, want 3: node, runtimes, modules", len(blocks))
	}
	typeGuide(t, root, strings.Replace(blocks[0][1], "tripod daemon", "tripod config check", 1), nil)

	address := harness.FreeAddress(t)
	o, hosted := harness.HostOrchestrator(t, address)
	harness.StartDaemon(t, harness.Edge(t, address, ""), hosted, harness.Set("edge.module_roots", []string{modules}))
	o.WaitRuntime("wasm", "A") // "within a few seconds"
	typeGuide(t, root, blocks[1][1]+blocks[2][1], []string{"TRIPOD_EDGE_BROKER=" + o.Broker, "TRIPOD_EDGE_ORCHESTRATOR=" + o.REST})
	if got := o.MustEdge("ps", "-a"); !strings.Contains(got, "ticker") || !strings.Contains(got, "killed") {
		t.Errorf("ps -a after the guide: got\n%s\nwant the running ticker and the stopped relay", got)
	}
	o.MustEdge("stop", "ticker", "relay") // one is stopped already
}

// typeGuide runs the commands of a block in one shell. Each line of output in the block must be printed, but numbers and
// words with an ellipsis can differ.
func typeGuide(t *testing.T, dir, block string, env []string) {
	t.Helper()
	var script, output []string
	here := ""
	for line := range strings.Lines(block) {
		line = strings.TrimSuffix(line, "\n")
		command, typed := strings.CutPrefix(line, "$ ")
		switch {
		case here != "":
			script = append(script, line)
			if line == here {
				here = ""
			}
		case typed:
			script = append(script, command)
			if _, rest, ok := strings.Cut(command, "<<'"); ok {
				here, _, _ = strings.Cut(rest, "'")
			}
		default:
			output = append(output, line)
		}
	}
	binary, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // a command that does not end hangs the guide's reader
	defer cancel()
	shell := exec.CommandContext(ctx, "bash", "-e", "-c", strings.Join(script, "\n"))
	shell.Dir = dir
	shell.Env = append(append(os.Environ(), "PATH="+filepath.Dir(binary)+":"+os.Getenv("PATH")), env...)
	shell.WaitDelay = time.Second
	got, err := shell.CombinedOutput()
	if err != nil {
		t.Fatalf("%s\n%v:\n%s", strings.Join(script, "\n"), err, got)
	}
	for _, line := range output {
		var words []string
		for _, word := range strings.Fields(line) {
			if strings.Contains(word, "…") {
				words = append(words, `\S+`)
				continue
			}
			words = append(words, digits.ReplaceAllString(regexp.QuoteMeta(word), "[0-9]+"))
		}
		if !regexp.MustCompile(`(?m)^` + strings.Join(words, ` +`) + `$`).Match(got) {
			t.Errorf("the guide shows %q, but its commands print\n%s", line, got)
		}
	}
}
