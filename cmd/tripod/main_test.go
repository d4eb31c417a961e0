package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"io"
	"log"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/cli"
	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/edge"
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
	if code != 0 || err != nil || c.Root != "/srv/b" || c.State != "/run/a" || c.Log.Level != "debug" ||
		c.GRPC.Socket != "/run/a/tripod.sock" {
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

func TestVersion(t *testing.T) {
	if code, out, _ := program("version"); code != 0 || !strings.HasPrefix(out, "tripod "+version) {
		t.Errorf("version: %d, %s", code, out)
	}
	var info versionInfo
	if code, out, _ := program("version", "-o", "json"); code != 0 || json.Unmarshal([]byte(out), &info) != nil || info.Version != version ||
		info.CRI != "v1" {
		t.Errorf("version -o json: %d, %s", code, out)
	}
	if code, out, _ := program("version", "-o", "yaml"); code != 0 || !strings.Contains(out, "cri: v1\n") {
		t.Errorf("version -o yaml: %d, %s", code, out)
	}
}

func TestFailpoints(t *testing.T) {
	failpoint.Needed(t)
	code, out, _ := program("failpoints")
	if names := strings.Fields(out); code != 0 || len(names) != len(failpoint.Names()) || len(names) < 20 {
		t.Errorf("failpoints: %d, %d names", code, len(names))
	}
}

// TestUnits checks that the systemd units use flags that exist and allow enough time to stop.
func TestUnits(t *testing.T) {
	for command, want := range map[string]struct {
		settings map[string]string
		stops    time.Duration
	}{
		"daemon": {map[string]string{"KillMode": "process", "Delegate": "", "RuntimeDirectoryPreserve": "yes", "StateDirectory": "tripod"},
			drainTime},
		"orchestrator": {map[string]string{"ProtectSystem": "strict", "StateDirectory": "tripod-orchestrator"}, edge.CloseTimeout},
	} {
		t.Run(command, func(t *testing.T) {
			settings := unit(t, want.settings["StateDirectory"]+".service")
			argv := strings.Fields(settings["ExecStart"])
			if len(argv) < 2 || filepath.Base(argv[0]) != "tripod" {
				t.Fatalf("ExecStart=%s", settings["ExecStart"])
			}
			found, rest, err := newRoot(nil, nil, nil).Find(argv[1:])
			if err != nil || found.Name() != command {
				t.Fatalf("ExecStart finds %v, %v", found, err)
			}
			if err := found.ParseFlags(rest); err != nil {
				t.Error(err)
			}
			want.settings["Type"] = "notify"
			for key, want := range want.settings {
				if settings[key] != want {
					t.Errorf("%s=%s, want %s", key, settings[key], want)
				}
			}
			if limit, err := time.ParseDuration(settings["TimeoutStopSec"] + "s"); err != nil || limit <= want.stops {
				t.Errorf("TimeoutStopSec=%s, but it may take %s to stop", settings["TimeoutStopSec"], want.stops)
			}
		})
	}
}

func unit(t *testing.T, name string) map[string]string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../dist", name))
	if err != nil {
		t.Fatal(err)
	}
	settings := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok && !strings.HasPrefix(line, "#") {
			settings[key] = value
		}
	}
	return settings
}

// TestCommandsAreWhole checks that each command has a description and that no flags conflict.
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
		"exec", "attach", "console", "ssh", "port-forward", "stats", "runp", "create", "start", "run", "stop", "stopp", "rm", "rmp", "events",
		"info", "status"} {
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

// TestManualPages: each visible command has a page.
func TestManualPages(t *testing.T) {
	dir := t.TempDir()
	if code, _, stderr := program("man", dir); code != 0 {
		t.Fatalf("man: %d, %s", code, stderr)
	}
	var check func(*cobra.Command)
	check = func(c *cobra.Command) {
		page := strings.ReplaceAll(c.CommandPath(), " ", "-") + ".1"
		text, err := os.ReadFile(filepath.Join(dir, page))
		if err != nil || !bytes.Contains(text, []byte(".SH SYNOPSIS")) {
			t.Errorf("page %s: got %d bytes, %v", page, len(text), err)
		}
		for _, sub := range c.Commands() {
			if sub.IsAvailableCommand() {
				check(sub)
			}
		}
	}
	check(newRoot(nil, io.Discard, io.Discard))
}

// TestCommandsOfOtherTools: what users of docker, kubectl and crictl type first exists, or one line says what to type instead.
func TestCommandsOfOtherTools(t *testing.T) {
	root := newRoot(strings.NewReader(""), io.Discard, io.Discard)
	for name := range elsewhere {
		var stderr bytes.Buffer
		code := run([]string{name, "-f", "x", "--", "y"}, strings.NewReader(""), io.Discard, &stderr)
		text := stderr.String()
		if code != 1 || strings.Count(text, "\n") != 1 {
			t.Errorf("tripod %s: got exit code %d and %q, want one line", name, code, text)
		}
		for _, named := range regexp.MustCompile("`tripod ([a-z]+)").FindAllStringSubmatch(text, -1) {
			if c, _, err := root.Find(named[1:]); err != nil || c.Hidden {
				t.Errorf("tripod %s: it names the command %q, which does not exist", name, named[1])
			}
		}
	}
}

// TestInterruptible: a command that a signal has ended has the exit code that shells give for it, unless it has one of its own.
func TestInterruptible(t *testing.T) {
	for signal, want := range map[unix.Signal]int{unix.SIGINT: 130, unix.SIGTERM: 143} {
		for _, own := range []error{nil, &cli.ExitError{Code: 3}} {
			c := &cobra.Command{SilenceErrors: true, SilenceUsage: true, RunE: func(c *cobra.Command, _ []string) error {
				if err := unix.Kill(os.Getpid(), signal); err != nil {
					return err
				}
				<-c.Context().Done()
				return cmp.Or(own, c.Context().Err())
			}}
			interruptible(c)
			c.SetArgs([]string{})
			if own != nil {
				want = cli.ExitCode(own)
			}
			if got := cli.ExitCode(c.ExecuteContext(t.Context())); got != want {
				t.Errorf("%s, own error %v: got exit code %d, want %d", signal, own, got, want)
			}
		}
	}
}
