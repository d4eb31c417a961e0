package main

import (
	"bytes"
	"log"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/tripod-run/tripod/internal/cli"
	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/failpoint"
)

func program(args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = run(args, strings.NewReader(""), &out, &errs)
	return code, out.String(), errs.String()
}

func TestConfigCommands(t *testing.T) {
	code, out, _ := program("config", "default")
	if _, err := config.Parse([]byte(out), "default"); code != 0 || err != nil {
		t.Errorf("config default: %d, %v", code, err)
	}
	file := filepath.Join(t.TempDir(), "c.toml")
	if err := os.WriteFile(file, []byte("state = \"/run/a\"\n[log]\nlevel = \"warn\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	code, out, _ = program("config", "show", "--config", file, "--root", "/srv/b", "--log-level", "debug")
	c, err := config.Parse([]byte(out), "show")
	if code != 0 || err != nil || c.Root != "/srv/b" || c.State != "/run/a" || c.Log.Level != "debug" || c.GRPC.Socket != "/run/a/tripod.sock" {
		t.Errorf("config show: %d, %v, %+v", code, err, c)
	}
	if code, out, _ = program("config", "check", "--config", file); code != 0 || !strings.Contains(out, "valid") {
		t.Errorf("config check: %d, %s", code, out)
	}
	code, _, stderr := program("config", "check", "--config", file, "--root", "b", "--log-level", "loud")
	if code != 1 || !strings.Contains(stderr, "root:") || !strings.Contains(stderr, "log.level:") {
		t.Errorf("config check of bad flags: %d, %s", code, stderr)
	}
}

func TestVersionAndFailpoints(t *testing.T) {
	if code, out, _ := program("version"); code != 0 || !strings.HasPrefix(out, "tripod "+version) {
		t.Errorf("version: %d, %s", code, out)
	}
	code, out, _ := program("failpoints")
	if names := strings.Fields(out); code != 0 || len(names) != len(failpoint.Names()) || len(names) < 20 {
		t.Errorf("failpoints: %d, %d names", code, len(names))
	}
}

// TestUnit holds that systemd's unit starts this program with flags that it has, and gives it time to stop.
func TestUnit(t *testing.T) {
	text, err := os.ReadFile("../../dist/tripod.service")
	if err != nil {
		t.Fatal(err)
	}
	settings := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok && !strings.HasPrefix(line, "#") {
			settings[key] = value
		}
	}
	argv := strings.Fields(settings["ExecStart"])
	if len(argv) < 2 || filepath.Base(argv[0]) != "tripod" {
		t.Fatalf("ExecStart=%s", settings["ExecStart"])
	}
	command, rest, err := newRoot(nil, nil, nil).Find(argv[1:])
	if err != nil || command.Name() != "daemon" {
		t.Fatalf("ExecStart finds %v, %v", command, err)
	}
	if err := command.ParseFlags(rest); err != nil {
		t.Error(err)
	}
	for key, want := range map[string]string{"Type": "notify", "KillMode": "process", "Delegate": "yes", "RuntimeDirectoryPreserve": "yes"} {
		if settings[key] != want {
			t.Errorf("%s=%s, want %s", key, settings[key], want)
		}
	}
	if limit, err := time.ParseDuration(settings["TimeoutStopSec"] + "s"); err != nil || limit <= drainTime {
		t.Errorf("TimeoutStopSec=%s, but the daemon may drain for %s", settings["TimeoutStopSec"], drainTime)
	}
}

// TestCommandsAreWhole holds that each command says what it does and that no two flags fight.
func TestCommandsAreWhole(t *testing.T) {
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		if c.Short == "" {
			t.Errorf("%s says nothing of itself", c.CommandPath())
		}
		c.InitDefaultHelpFlag()
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	root := newRoot(nil, nil, nil)
	walk(root)
	for _, name := range []string{"daemon", "check", "pods", "ps", "images", "pull", "rmi", "inspect", "inspectp", "inspecti", "logs",
		"exec", "attach", "console", "port-forward", "stats", "runp", "create", "start", "run", "stop", "stopp", "rm", "rmp", "events", "info", "status"} {
		if c, _, err := root.Find([]string{name}); err != nil || c == root {
			t.Errorf("no command %s: %v", name, err)
		}
	}
	if c, _, _ := root.Find([]string{"ps"}); c.GroupID != cli.Group {
		t.Error("ps is not listed with the other client commands")
	}
}

func TestLogger(t *testing.T) {
	defer slog.SetDefault(slog.Default())
	var out bytes.Buffer
	c := config.Default()
	c.Log.Format, c.Log.Level = "json", "warn"
	newLogger(c, &out).Info("chatter")
	slog.Warn("worth knowing", "pod", 7)
	log.Print("of the standard library") //nolint:forbidigo // that it goes to slog is what is tested
	if text := out.String(); !strings.Contains(text, `"level":"WARN","msg":"worth knowing","pod":7`) || strings.Contains(text, "chatter") ||
		strings.Contains(text, "standard library") {
		t.Errorf("logged %s", text)
	}
	c.Log.Format, c.Log.Level = "text", "info"
	newLogger(c, &out)
	log.Print("of the standard library") //nolint:forbidigo // that it goes to slog is what is tested
	if !strings.Contains(out.String(), `level=INFO msg="of the standard library"`) {
		t.Errorf("logged %s", out.String())
	}
}
