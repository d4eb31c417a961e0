package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

func TestLogs(t *testing.T) {
	ctx := context.Background()
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	ran := func(t *testing.T, script string) []harness.LogLine {
		t.Helper()
		c := startPod(t, d).Run(harness.ContainerConfig("c", harness.Busybox, harness.Shell(script)))
		c.WaitExit(0)
		return c.Logs()
	}
	t.Run("runtime should support starting container with log [Conformance]", func(t *testing.T) {
		before := time.Now()
		lines := ran(t, "echo hello; echo world >&2; echo; printf 'no newline'")
		if harness.Text(lines, "stdout") != "hello\n\nno newline" && harness.Text(lines, "stdout") != "hello\n\nno newline\n" ||
			harness.Text(lines, "stderr") != "world\n" {
			t.Errorf("lines: got %v, want hello, an empty line and \"no newline\" from stdout, world from stderr", lines)
		}
		for _, l := range lines {
			if l.Time.Before(before.Add(-time.Second)) || l.Time.After(time.Now()) {
				t.Errorf("time of a line: got %v, want between the start and now", l.Time)
			}
		}
	})
	t.Run("the file is there at once, and not for everybody", func(t *testing.T) {
		c := startPod(t, d).Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
		fi, err := os.Stat(c.LogFile())
		if err != nil || fi.Mode().Perm()&0o027 != 0 {
			t.Errorf("log file: got %v, error %v; want one that others cannot read", fi, err)
		}
	})
	t.Run("long lines come in parts, in the order of their stream", func(t *testing.T) {
		lines := ran(t, "head -c 100000 /dev/zero | tr '\\0' a; echo; head -c 50000 /dev/zero | tr '\\0' b >&2; echo >&2; echo short")
		if got := harness.Text(lines, "stdout"); got != strings.Repeat("a", 100000)+"\nshort\n" {
			t.Errorf("stdout: got %d bytes, want %d", len(got), 100007)
		}
		if got := harness.Text(lines, "stderr"); got != strings.Repeat("b", 50000)+"\n" {
			t.Errorf("stderr: got %d bytes, want %d", len(got), 50001)
		}
		parts := 0
		for _, l := range lines {
			if l.Partial {
				parts++
			}
			if len(l.Text) > 16<<10 {
				t.Errorf("length of a line: got %d bytes, want at most %d", len(l.Text), 16<<10)
			}
		}
		if parts == 0 {
			t.Error("found no partial line")
		}
	})
	t.Run("any bytes", func(t *testing.T) {
		if got := harness.Text(ran(t, `printf '\001\377\000x y\r\n'`), ""); got != "\x01\xff\x00x y\r\n" {
			t.Errorf("log: got %q, want the bytes written", got)
		}
	})
	t.Run("runtime should support reopening container log [Conformance]", func(t *testing.T) {
		c := startPod(t, d).Run(harness.ContainerConfig("c", harness.Busybox,
			harness.Shell("i=0; while :; do echo line $i; i=$((i+1)); usleep 5000; done")))
		c.WaitLog("line 3")
		rotated := c.LogFile() + ".1"
		if err := os.Rename(c.LogFile(), rotated); err != nil {
			t.Fatal(err)
		}
		if err := d.Runtime().ReopenContainerLog(ctx, c.ID); err != nil {
			t.Fatal(err)
		}
		c.WaitLog("line")
		c.Stop(0)
		c.WaitState(exited)
		all := append(harness.ReadLog(t, rotated), c.Logs()...)
		for i, l := range all {
			if l.Text != fmt.Sprintf("line %d", i) {
				t.Fatalf("line %d of both files: got %q, want \"line %d\"", i, l.Text, i)
			}
		}
	})
	t.Run("reopening the log of one that does not run", func(t *testing.T) {
		c := startPod(t, d).Create(harness.ContainerConfig("c", harness.Busybox))
		_, err := d.CRI().ReopenContainerLog(ctx, &runtimeapi.ReopenContainerLogRequest{ContainerId: c.ID})
		wantCode(t, err, codes.FailedPrecondition)
		_, err = d.CRI().ReopenContainerLog(ctx, &runtimeapi.ReopenContainerLogRequest{ContainerId: strings.Repeat("1f", 32)})
		wantCode(t, err, codes.NotFound)
	})
	t.Run("N1 the log goes on while the daemon is dead", func(t *testing.T) {
		c := startPod(t, d).Run(harness.ContainerConfig("c", harness.Busybox,
			harness.Shell("i=0; while :; do echo line $i; i=$((i+1)); usleep 5000; done")))
		c.WaitLog("line 3")
		d.Kill()
		last := c.Logs()
		target := fmt.Sprintf("line %d\n", len(last)+20)
		c.WaitLog(target) // reads only the file, because the daemon is down
		d.Start()
		if err := d.Runtime().ReopenContainerLog(ctx, c.ID); err != nil {
			t.Fatal(err)
		}
		c.Stop(0)
		c.WaitState(exited)
		for i, l := range c.Logs() {
			if l.Text != fmt.Sprintf("line %d", i) {
				t.Fatalf("line %d: got %q, want \"line %d\"", i, l.Text, i)
			}
		}
	})
	t.Run("without a log path there is no log, and output does not block", func(t *testing.T) {
		p := startPod(t, d)
		config := harness.ContainerConfig("c", harness.Busybox, harness.Shell("head -c 1000000 /dev/zero"))
		config.LogPath = ""
		c := p.Run(config)
		c.WaitExit(0)
		if entries, err := os.ReadDir(p.Config.LogDirectory); err != nil || len(entries) != 0 {
			t.Errorf("log directory: got %v, error %v; want it empty", entries, err)
		}
	})
	t.Run("C3 a log path that leads out of the log directory", func(t *testing.T) {
		p := startPod(t, d)
		outside := t.TempDir()
		for name, target := range map[string]string{"file.log": filepath.Join(outside, "victim"), "dir": outside} {
			if err := os.Symlink(target, filepath.Join(p.Config.LogDirectory, name)); err != nil {
				t.Fatal(err)
			}
		}
		for i, path := range []string{"../x.log", "a/../../x.log", "/etc/x.log", "file.log", "dir/x.log"} {
			config := harness.ContainerConfig(fmt.Sprint("c", i), harness.Busybox, harness.Shell("echo written"))
			config.LogPath = path
			if msg := refused(t, d, p, config); msg == "" {
				t.Errorf("log path %s was accepted, want a refusal", path)
			}
		}
		if entries, err := os.ReadDir(outside); err != nil || len(entries) != 0 {
			t.Errorf("files outside of the log directory: got %v, error %v; want none", entries, err)
		}
	})
	t.Run("C3 a symlink put there before the log is reopened", func(t *testing.T) {
		c := startPod(t, d).Run(harness.ContainerConfig("c", harness.Busybox, harness.Shell("while :; do echo line; usleep 5000; done")))
		c.WaitLog("line")
		victim := filepath.Join(t.TempDir(), "victim")
		if err := os.Remove(c.LogFile()); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(victim, c.LogFile()); err != nil {
			t.Fatal(err)
		}
		_, err := d.CRI().ReopenContainerLog(ctx, &runtimeapi.ReopenContainerLogRequest{ContainerId: c.ID})
		if fi, statErr := os.Lstat(c.LogFile()); err == nil && (statErr != nil || !fi.Mode().IsRegular()) {
			t.Errorf("log file after ReopenContainerLog: got %v, error %v; want a refusal or a regular file", fi, statErr)
		}
		if _, err := os.Stat(victim); err == nil {
			t.Error("ReopenContainerLog created the target of the symlink")
		}
		if s := c.Status(); s.State != running {
			t.Errorf("status: got %v, want running", s)
		}
	})
}
