package e2e

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	criclient "k8s.io/cri-client/pkg"

	"github.com/tripod-run/tripod/test/harness"
)

// listed returns the IDs of the containers that ListContainers returns for a filter.
func listed(t *testing.T, d *harness.Daemon, filter *runtimeapi.ContainerFilter) []string {
	t.Helper()
	all, err := d.Runtime().ListContainers(context.Background(), filter)
	if err != nil {
		t.Fatal(err)
	}
	ids := make([]string, len(all))
	for i, c := range all {
		ids[i] = c.Id
	}
	return ids
}

func TestContainerOperations(t *testing.T) {
	ctx := context.Background()
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	gone := func(t *testing.T, c *harness.Container) {
		t.Helper()
		_, err := d.CRI().ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: c.ID})
		wantCode(t, err, codes.NotFound)
		if got := listed(t, d, &runtimeapi.ContainerFilter{Id: c.ID}); len(got) != 0 {
			t.Errorf("ListContainers after the removal: got %v, want none", got)
		}
	}
	t.Run("runtime should support creating container [Conformance]", func(t *testing.T) {
		c := startPod(t, d).Create(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
		if s := c.Status(); s.State != runtimeapi.ContainerState_CONTAINER_CREATED || s.StartedAt != 0 || s.FinishedAt != 0 {
			t.Errorf("status: got %v, want created", s)
		}
		if got := listed(t, d, &runtimeapi.ContainerFilter{Id: c.ID}); !slices.Equal(got, []string{c.ID}) {
			t.Errorf("ListContainers: got %v, want only %s", got, c.ID)
		}
	})
	t.Run("runtime should support preserving container attributes [Conformance]", func(t *testing.T) {
		p := startPod(t, d)
		before := time.Now()
		config := harness.ContainerConfig("attributes", harness.Busybox, harness.Sleep())
		config.Metadata.Attempt = 3
		config.Labels = map[string]string{"app": "web", "tripod.run/x": "y"}
		config.Annotations = map[string]string{"long": strings.Repeat("v", 10_000), "empty": ""}
		c := p.Create(config)
		s := c.Status()
		if s.Metadata.Name != "attributes" || s.Metadata.Attempt != 3 || !maps.Equal(s.Labels, config.Labels) ||
			!maps.Equal(s.Annotations, config.Annotations) {
			t.Errorf("status: got %v, want the attributes of %v", s, config)
		}
		if at := time.Unix(0, s.CreatedAt); at.Before(before) || at.After(time.Now()) {
			t.Errorf("creation time: got %v, want between %v and now", at, before)
		}
		if s.Image.GetImage() != harness.Busybox || s.LogPath != c.LogFile() {
			t.Errorf("status: got image %v, log path %q; want %s, %q", s.Image, s.LogPath, harness.Busybox, c.LogFile())
		}
		for name, filter := range map[string]*runtimeapi.ContainerFilter{
			"label": {LabelSelector: map[string]string{"app": "web"}}, "pod": {PodSandboxId: p.ID},
			"state": {PodSandboxId: p.ID, State: &runtimeapi.ContainerStateValue{State: runtimeapi.ContainerState_CONTAINER_CREATED}},
			"short": {Id: c.ID[:12]},
		} {
			if got := listed(t, d, filter); !slices.Equal(got, []string{c.ID}) {
				t.Errorf("ListContainers by %s: got %v, want only %s", name, got, c.ID)
			}
		}
		for name, filter := range map[string]*runtimeapi.ContainerFilter{
			"label": {LabelSelector: map[string]string{"app": "other"}}, "pod": {PodSandboxId: strings.Repeat("0", 64)},
			"state": {PodSandboxId: p.ID, State: &runtimeapi.ContainerStateValue{State: runtimeapi.ContainerState_CONTAINER_RUNNING}},
		} {
			if got := listed(t, d, filter); len(got) != 0 {
				t.Errorf("ListContainers by another %s: got %v, want none", name, got)
			}
		}
	})
	t.Run("runtime should support starting container [Conformance]", func(t *testing.T) {
		c := sleeper(t, d)
		s := c.Status()
		if s.State != runtimeapi.ContainerState_CONTAINER_RUNNING || s.StartedAt < s.CreatedAt || s.FinishedAt != 0 {
			t.Errorf("status: got %v, want running", s)
		}
	})
	t.Run("runtime should support stopping container [Conformance]", func(t *testing.T) {
		c := startPod(t, d).Run(harness.ContainerConfig("c", harness.Busybox,
			harness.Shell("trap exit TERM; echo ready; while :; do sleep 1; done")))
		c.WaitLog("ready") // PID 1 ignores SIGTERM until the trap is set
		begin := time.Now()
		c.Stop(60 * time.Second)
		if took := time.Since(begin); took > 20*time.Second {
			t.Errorf("stop of a container that exits on SIGTERM: took %v, want at most 20s", took)
		}
		if s := c.Status(); s.State != runtimeapi.ContainerState_CONTAINER_EXITED || s.FinishedAt < s.StartedAt {
			t.Errorf("status: got %v, want exited", s)
		}
	})
	t.Run("a container that does not listen is killed after the grace period", func(t *testing.T) {
		c := startPod(t, d).Run(harness.ContainerConfig("c", harness.Busybox,
			harness.Shell("trap '' TERM; echo deaf; while :; do sleep 1; done")))
		c.WaitLog("deaf")
		begin := time.Now()
		c.Stop(time.Second)
		if took := time.Since(begin); took < time.Second {
			t.Errorf("the container was killed after %v, want at least 1s", took)
		}
		if s := c.WaitExit(137); s.Reason != "Error" {
			t.Errorf("reason: got %q, want Error", s.Reason)
		}
	})
	t.Run("runtime should support removing created container [Conformance]", func(t *testing.T) {
		c := startPod(t, d).Create(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
		c.Remove()
		gone(t, c)
	})
	t.Run("runtime should support removing running container [Conformance]", func(t *testing.T) {
		c := sleeper(t, d)
		c.Remove()
		gone(t, c)
	})
	t.Run("runtime should support removing stopped container [Conformance]", func(t *testing.T) {
		c := sleeper(t, d)
		c.Stop(10 * time.Second)
		c.Remove()
		gone(t, c)
		if _, err := os.Stat(c.LogFile()); err != nil {
			t.Errorf("log after the removal, which the kubelet removes: %v", err)
		}
	})
	t.Run("runtime should support execSync [Conformance]", func(t *testing.T) {
		c := sleeper(t, d)
		if out := c.Must("echo", "-n", "hello"); out != "hello" {
			t.Errorf("output: got %q, want hello", out)
		}
	})
	t.Run("runtime should support execSync with timeout [Conformance]", func(t *testing.T) {
		c := sleeper(t, d)
		begin := time.Now()
		_, _, err := d.Runtime().ExecSync(ctx, c.ID, []string{"sleep", "1234"}, time.Second)
		if took := time.Since(begin); took < time.Second || took > 10*time.Second {
			t.Errorf("ExecSync with a timeout of 1s: took %v, want 1s to 10s", took)
		}
		if !errors.Is(err, criclient.ErrCommandTimedOut) {
			t.Errorf("ExecSync beyond its timeout: got error %v, want %v", err, criclient.ErrCommandTimedOut)
		}
		if out := c.Must("ps"); strings.Contains(out, "1234") {
			t.Errorf("the program still runs:\n%s", out)
		}
	})
	t.Run("what the state forbids is a failed precondition", func(t *testing.T) {
		p := startPod(t, d)
		c := p.Create(harness.ContainerConfig("c", harness.Busybox, harness.Shell("true")))
		_, err := d.CRI().ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"true"}})
		wantCode(t, err, codes.FailedPrecondition)
		c.Start()
		c.WaitExit(0)
		_, err = d.CRI().ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"true"}})
		wantCode(t, err, codes.FailedPrecondition)
		p.Stop()
		_, err = create(d, p, harness.ContainerConfig("late", harness.Busybox))
		wantCode(t, err, codes.FailedPrecondition)
	})
}

func TestIdempotence(t *testing.T) {
	ctx := context.Background()
	d := harness.StartDaemon(t)
	cri, unknown := d.CRI(), strings.Repeat("1f", 32)
	stopPod := func(id string) error {
		_, err := cri.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
		return err
	}
	removePod := func(id string) error {
		_, err := cri.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
		return err
	}
	stop := func(id string) error {
		_, err := cri.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: id})
		return err
	}
	remove := func(id string) error {
		_, err := cri.RemoveContainer(ctx, &runtimeapi.RemoveContainerRequest{ContainerId: id})
		return err
	}
	for name, call := range map[string]func() error{
		"StopPodSandbox should not return an error if not found":   func() error { return stopPod(unknown) },
		"RemovePodSandbox should not return an error if not found": func() error { return removePod(unknown) },
		"StopContainer should not return an error if not found":    func() error { return stop(unknown) },
		"RemoveContainer should not return an error if not found":  func() error { return remove(unknown) },
		"RemoveImage should not return an error if not found": func() error {
			return d.Images().RemoveImage(ctx, &runtimeapi.ImageSpec{Image: "images.test/no/such:image"})
		},
	} {
		t.Run(name, func(t *testing.T) {
			if err := errors.Join(call(), call()); err != nil {
				t.Error(err)
			}
		})
	}
	t.Run("StopPodSandbox should not return an error if already stopped", func(t *testing.T) {
		p := startPod(t, d)
		if err := errors.Join(stopPod(p.ID), stopPod(p.ID)); err != nil {
			t.Error(err)
		}
	})
	t.Run("StopContainer should not return an error if already stopped", func(t *testing.T) {
		c := sleeper(t, d)
		if err := errors.Join(stop(c.ID), stop(c.ID)); err != nil {
			t.Error(err)
		}
	})
	t.Run("C2 stop and remove in parallel", func(t *testing.T) {
		p := d.RunPod(t, harness.PodConfig(t, "p"))
		c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
		calls := []func() error{
			func() error { return stop(c.ID) }, func() error { return remove(c.ID) }, func() error { return stopPod(p.ID) },
			func() error { return removePod(p.ID) },
		}
		results := make(chan error)
		for range 3 {
			for _, call := range calls {
				go func() { results <- call() }()
			}
		}
		for range 3 * len(calls) {
			if err := <-results; err != nil {
				t.Error(err)
			}
		}
		if _, err := cri.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: p.ID}); err == nil {
			t.Error("PodSandboxStatus of the removed pod succeeded, want an error")
		}
	})
}

// TestExit checks how the end of a container is reported.
func TestExit(t *testing.T) {
	ctx := context.Background()
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	for name, c := range map[string]struct {
		script string
		code   int32
		reason string
	}{
		"Completed":           {"exit 0", 0, "Completed"},
		"Error":               {"exit 3", 3, "Error"},
		"a program not found": {"/no/such/program", 127, "Error"},
		"Completed, with a pipe still held by a child": {"sleep 2 & exit 0", 0, "Completed"},
	} {
		t.Run(name, func(t *testing.T) {
			ctr := startPod(t, d).Run(harness.ContainerConfig("c", harness.Busybox, harness.Shell(c.script)))
			if s := ctr.WaitExit(c.code); s.Reason != c.reason || s.FinishedAt < s.StartedAt || s.StartedAt == 0 {
				t.Errorf("status: got %v, want reason %s and valid times", s, c.reason)
			}
		})
	}
	t.Run("should terminate with exitCode 137 and reason OOMKilled", func(t *testing.T) {
		c := startPod(t, d).Run(harness.ContainerConfig("c", harness.Busybox, harness.Command("dd", "if=/dev/zero", "of=/dev/null", "bs=100M"),
			resources(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 15 << 20, MemorySwapLimitInBytes: 15 << 20})))
		if s := c.WaitExit(137); s.Reason != "OOMKilled" {
			t.Errorf("reason: got %q, want OOMKilled", s.Reason)
		}
	})
	t.Run("killed from outside", func(t *testing.T) {
		c := startPod(t, d).Run(harness.ContainerConfig("c", harness.Busybox, harness.Command("sleep", "76543")))
		killByCommand(t, "sleep\x0076543\x00")
		if s := c.WaitExit(137); s.Reason != "Error" {
			t.Errorf("reason: got %q, want Error", s.Reason)
		}
	})
	t.Run("StartError", func(t *testing.T) {
		c := startPod(t, d).Create(harness.ContainerConfig("c", harness.Busybox, harness.Command("/no/such/program")))
		_, err := d.CRI().StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: c.ID})
		if err == nil || !strings.Contains(err.Error(), "/no/such/program") {
			t.Errorf("StartContainer: got error %v, want one that names the program", err)
		}
		if s := c.WaitExit(128); s.Reason != "StartError" || !strings.Contains(s.Message, "/no/such/program") {
			t.Errorf("status: got %v, want StartError and a message that names the program", s)
		}
	})
	t.Run("stop signals", func(t *testing.T) {
		for _, s := range []struct {
			name   string
			signal runtimeapi.Signal
			code   int32
			log    string
		}{
			{"the image's", runtimeapi.Signal_SIGNAL_RUNTIME_DEFAULT, 7, "got USR1"},
			{"the request's before the image's", runtimeapi.Signal_SIGNAL_SIGTERM, 15, "got TERM"},
		} {
			t.Run(s.name, func(t *testing.T) {
				config := harness.ContainerConfig("c", harness.StopSignal)
				config.StopSignal = s.signal
				c := startPod(t, d).Run(config)
				c.WaitLog("ready")
				c.Stop(20 * time.Second)
				c.WaitExit(s.code)
				c.WaitLog(s.log)
				want := s.signal
				if want == runtimeapi.Signal_SIGNAL_RUNTIME_DEFAULT {
					want = runtimeapi.Signal_SIGNAL_SIGUSR1
				}
				if got := c.Status().StopSignal; got != want {
					t.Errorf("stop signal in the status: got %v, want %v", got, want)
				}
			})
		}
	})
}

// TestProcess checks how the image's configuration and the request's are combined, as Kubernetes defines it.
func TestProcess(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Config)
	d.Pull(t, harness.Busybox)
	first := func(t *testing.T, change func(*runtimeapi.ContainerConfig)) string {
		t.Helper()
		config := harness.ContainerConfig("c", harness.Config)
		if change != nil {
			change(config)
		}
		c := startPod(t, d).Run(config)
		return strings.TrimSpace(c.WaitLog("\n"))
	}
	for name, c := range map[string]struct {
		change func(*runtimeapi.ContainerConfig)
		want   string
	}{
		"all from the image": {nil, "hello from the image in /srv as 1234:5678"},
		"args replace the image's command": {func(c *runtimeapi.ContainerConfig) {
			c.Args = []string{"echo args"}
		}, "args"},
		"a command drops the image's entrypoint and command": {func(c *runtimeapi.ContainerConfig) {
			c.Command = []string{"echo", "command"}
		}, "command"},
		"command and args": {func(c *runtimeapi.ContainerConfig) {
			c.Command, c.Args = []string{"echo", "command"}, []string{"and", "args"}
		}, "command and args"},
		"the request's environment goes before the image's": {func(c *runtimeapi.ContainerConfig) {
			c.Envs = []*runtimeapi.KeyValue{{Key: "GREETING", Value: []byte("hello from the request")}, {Key: "NEW", Value: []byte("a=b c")}}
			c.Args = []string{`echo "$GREETING, $NEW, ${EMPTY-unset}."`}
		}, "hello from the request, a=b c, ."},
		"the request's working directory": {func(c *runtimeapi.ContainerConfig) {
			c.WorkingDir, c.Args = "/data", []string{"pwd"}
		}, "/data"},
		"a working directory that is not there is made": {func(c *runtimeapi.ContainerConfig) {
			c.WorkingDir, c.Args = "/made/for/me", []string{"pwd"}
		}, "/made/for/me"},
		"PATH and HOSTNAME": {func(c *runtimeapi.ContainerConfig) {
			c.Args = []string{`echo "$PATH"`}
		}, "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := first(t, c.change); got != c.want {
				t.Errorf("output: got %q, want %q", got, c.want)
			}
		})
	}
	t.Run("environment that is not UTF-8 is refused, not changed", func(t *testing.T) {
		config := harness.ContainerConfig("c", harness.Busybox)
		config.Envs = []*runtimeapi.KeyValue{{Key: "RAW", Value: []byte{0xff, 0xfe}}}
		if msg := refused(t, d, startPod(t, d), config); !strings.Contains(msg, "RAW") {
			t.Errorf("refusal: got %q, want the name of the variable", msg)
		}
	})
	t.Run("stdin is empty unless it is asked for", func(t *testing.T) {
		p := startPod(t, d)
		c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Shell("cat; echo end")))
		c.WaitExit(0)
		if got := harness.Text(c.Logs(), ""); got != "end\n" {
			t.Errorf("log: got %q, want %q", got, "end\n")
		}
	})
	t.Run("a terminal", func(t *testing.T) {
		config := harness.ContainerConfig("c", harness.Busybox,
			harness.Shell("test -t 0 && test -t 1 && test -t 2 && tty; echo out; echo err >&2"))
		config.Tty, config.Stdin = true, true
		c := startPod(t, d).Run(config)
		c.WaitExit(0)
		if got := strings.ReplaceAll(harness.Text(c.Logs(), "stdout"), "\r", ""); !strings.HasPrefix(got, "/dev/") ||
			!strings.HasSuffix(got, "out\nerr\n") {
			t.Errorf("log: got %q, want a terminal and both lines", got)
		}
	})
}

func TestVolumesAndDevices(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	for name, path := range map[string]func(dir string) string{
		"runtime should support starting container with volume [Conformance]": func(dir string) string { return dir },
		"runtime should support starting container with volume when host path is a symlink [Conformance]": func(dir string) string {
			if err := os.Symlink(dir, dir+"-link"); err != nil {
				panic(err)
			}
			return dir + "-link"
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			c := sleeper(t, d, mounts(&runtimeapi.Mount{HostPath: path(dir), ContainerPath: "/mnt/volume"}))
			c.Must("sh", "-c", "echo from the container >/mnt/volume/file")
			if data, err := os.ReadFile(filepath.Join(dir, "file")); err != nil || string(data) != "from the container\n" {
				t.Errorf("file of the container on the node: got %q, error %v", data, err)
			}
			m := c.Status().Mounts
			if len(m) != 1 || m[0].ContainerPath != "/mnt/volume" {
				t.Errorf("mounts in the status: got %v, want /mnt/volume", m)
			}
		})
	}
	t.Run("a file, over one of the image", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(file, []byte("mine\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		c := sleeper(t, d, mounts(&runtimeapi.Mount{HostPath: file, ContainerPath: "/etc/passwd", Readonly: true}))
		if got := c.Must("cat", "/etc/passwd"); got != "mine\n" {
			t.Errorf("/etc/passwd: got %q, want the mounted file", got)
		}
	})
	t.Run("a mount within a mount, given in the wrong order", func(t *testing.T) {
		outer, inner := t.TempDir(), t.TempDir()
		if err := os.WriteFile(filepath.Join(inner, "file"), []byte("inner"), 0o644); err != nil {
			t.Fatal(err)
		}
		c := sleeper(t, d, mounts(&runtimeapi.Mount{HostPath: inner, ContainerPath: "/a/b"},
			&runtimeapi.Mount{HostPath: outer, ContainerPath: "/a"}))
		if got := c.Must("cat", "/a/b/file"); got != "inner" {
			t.Errorf("/a/b/file: got %q, want the inner mount's", got)
		}
	})
	t.Run("a device under another name, with the permissions asked for", func(t *testing.T) {
		c := sleeper(t, d, func(c *runtimeapi.ContainerConfig) {
			c.Devices = []*runtimeapi.Device{
				{HostPath: "/dev/zero", ContainerPath: "/dev/nought", Permissions: "rw"},
				{HostPath: "/dev/kmsg", ContainerPath: "/dev/messages", Permissions: "r"},
			}
		})
		if got := c.Must("sh", "-c", "head -c 3 /dev/nought | od -An -tx1; echo x >/dev/nought"); strings.TrimSpace(got) != "00 00 00" {
			t.Errorf("/dev/nought: got %q, want three zeros", got)
		}
		if _, stderr, code := c.ExecSync("sh", "-c", "echo x >/dev/messages"); code == 0 || !strings.Contains(stderr, "not permitted") {
			t.Errorf("write to a device with the permissions r: got code %d, stderr %q; want \"not permitted\"", code, stderr)
		}
	})
	t.Run("devices of the node are not seen", func(t *testing.T) {
		c := sleeper(t, d)
		if _, stderr, code := c.ExecSync("sh", "-c", "mknod /kmsg c 1 11 && cat /kmsg"); code == 0 || !strings.Contains(stderr, "not permitted") {
			t.Errorf("read of a forbidden device: got code %d, stderr %q; want \"not permitted\"", code, stderr)
		}
	})
}
