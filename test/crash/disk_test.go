package crash

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// readOnly makes a directory of a daemon read-only, as the kernel does with a file system that has errors, until undo.
func readOnly(t *testing.T, dir string) (undo func()) {
	t.Helper()
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	done := false
	undo = func() {
		if done {
			return
		}
		done = true
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(undo)
	return undo
}

// wantCode checks that the code of a call's error is one of want.
func wantCode(t *testing.T, what string, err error, want ...codes.Code) {
	t.Helper()
	for _, code := range want {
		if status.Code(err) == code {
			return
		}
	}
	t.Errorf("%s: got error %v, want one of the codes %v", what, err, want)
}

// wantChecked checks that `tripod check` reports text.
func wantChecked(t *testing.T, d *harness.Daemon, text string) {
	t.Helper()
	bin, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	out, _ := exec.Command(bin, "check", "--config", d.ConfigPath()).CombinedOutput() // fails, because the node cannot run pods
	if !strings.Contains(string(out), text) {
		t.Errorf("tripod check: got output without %q:\n%s", text, out)
	}
}

// wantReady waits until the daemon reports that its runtime and its network are ready.
func wantReady(t *testing.T, d *harness.Daemon) {
	t.Helper()
	harness.Eventually(t, 60*time.Second, func() error {
		conditions, err := d.Conditions()
		if err == nil && (!conditions[runtimeapi.RuntimeReady].GetStatus() || !conditions[runtimeapi.NetworkReady].GetStatus()) {
			err = fmt.Errorf("conditions: got %v, want RuntimeReady and NetworkReady", conditions)
		}
		return err
	})
}

// wantPod creates, runs and removes a pod, which shows that the node works.
func wantPod(t *testing.T, d *harness.Daemon) {
	t.Helper()
	pod := d.RunPod(t, harness.PodConfig(t, "whole"))
	pod.Run(harness.ContainerConfig("c", harness.Busybox, harness.Shell("exit 7"))).WaitExit(7)
	pod.Remove()
}

// TestN5ReadOnlyRoot: a daemon with a read-only root starts, reports the problem, serves and stops running containers,
// and refuses what it cannot do. Once the root is writable, it works again without a restart.
func TestN5ReadOnlyRoot(t *testing.T) {
	for _, restarted := range []bool{true, false} {
		t.Run(fmt.Sprintf("at start %v", restarted), func(t *testing.T) {
			d := harness.StartDaemon(t)
			pod := d.RunPod(t, harness.PodConfig(t, "p"))
			runs := pod.Run(harness.ContainerConfig("runs", harness.Busybox, harness.Sleep()))
			stays := pod.Run(harness.ContainerConfig("stays", harness.Busybox, harness.Sleep()))
			if restarted {
				d.Stop()
			}
			undo := readOnly(t, d.Root)
			if restarted {
				d.StartNotReady()
			}
			harness.Eventually(t, 30*time.Second, func() error {
				conditions, err := d.Conditions()
				if err != nil {
					return err
				}
				var errs []error
				for _, name := range []string{runtimeapi.RuntimeReady, runtimeapi.NetworkReady} {
					if c := conditions[name]; c.GetStatus() || c.GetReason() == "" || !strings.Contains(c.GetMessage(), "read-only file system") {
						errs = append(errs, fmt.Errorf("condition %s: got %v, want false because of a read-only file system", name, c))
					}
				}
				return errors.Join(errs...)
			})
			wantChecked(t, d, "read-only file system")

			if s := runs.Status(); s.State != runtimeapi.ContainerState_CONTAINER_RUNNING {
				t.Errorf("status of the running container: got %v, want running", s)
			}
			runs.Must("true")
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			_, err := d.CRI().RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: harness.PodConfig(t, "new")})
			wantCode(t, "RunPodSandbox", err, codes.Unavailable)
			_, err = d.ImageCRI().PullImage(ctx, &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: harness.Nginx}})
			wantCode(t, "PullImage", err, codes.Unavailable)
			_, err = d.CRI().CreateContainer(ctx, &runtimeapi.CreateContainerRequest{
				PodSandboxId: pod.ID, Config: harness.ContainerConfig("new", harness.Busybox, harness.Sleep()), SandboxConfig: pod.Config,
			})
			wantCode(t, "CreateContainer", err, codes.Unavailable)

			runs.Stop(5 * time.Second)
			if s := runs.Status(); s.State != runtimeapi.ContainerState_CONTAINER_EXITED {
				t.Errorf("status of the stopped container: got %v, want exited", s)
			}
			_, err = d.CRI().RemoveContainer(ctx, &runtimeapi.RemoveContainerRequest{ContainerId: runs.ID})
			wantCode(t, "RemoveContainer", err, codes.Unavailable)
			_, err = d.CRI().StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: pod.ID})
			wantCode(t, "StopPodSandbox", err, codes.OK, codes.Unavailable) // the pod's address cannot be released yet
			if s := stays.Status(); s.State != runtimeapi.ContainerState_CONTAINER_EXITED {
				t.Errorf("status of the stopped pod's container: got %v, want exited", s)
			}

			undo()
			wantReady(t, d)
			pod.Remove()
			wantPod(t, d)
			d.Restart() // by now the daemon has written what it could not write before
		})
	}
}

// TestN11ImageStoreIsDamaged: if the images' metadata is empty, truncated, garbage or missing, the node starts and
// reports it, the containers keep running, and the store is not changed. Once the file is restored, the node works
// without a restart.
func TestN11ImageStoreIsDamaged(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.PodConfig(t, "p"))
	c := pod.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
	c.Must("sh", "-c", "echo kept >/kept")
	for _, name := range []string{"image/metadata.db", "image/snapshots/metadata.db"} {
		file := filepath.Join(d.Root, name)
		d.Stop()
		right, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		garbage := append([]byte(nil), right...)
		for i := range garbage[2*os.Getpagesize():] {
			garbage[2*os.Getpagesize()+i] = byte(i)
		}
		for damage, content := range map[string][]byte{"empty": {}, "cut off": right[:3*os.Getpagesize()], "garbage": garbage, "gone": nil} {
			t.Run(filepath.Base(filepath.Dir(name))+" "+damage, func(t *testing.T) {
				before := harness.Snapshot(d)
				if err := os.Remove(file); err != nil {
					t.Fatal(err)
				}
				if content != nil {
					if err := os.WriteFile(file, content, 0o600); err != nil {
						t.Fatal(err)
					}
				}
				d.StartNotReady()
				conditions, err := d.Conditions()
				if r := conditions[runtimeapi.RuntimeReady]; err != nil || r.GetReason() != "StoreDamaged" ||
					!strings.Contains(r.GetMessage(), "nothing was changed") {
					t.Errorf("conditions: got %v, error %v; want reason StoreDamaged", conditions, err)
				}
				wantChecked(t, d, "nothing was changed")
				if out := c.Must("cat", "/kept"); strings.TrimSpace(out) != "kept" {
					t.Errorf("the container's file: got %q, want kept", out)
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				_, err = d.CRI().CreateContainer(ctx, &runtimeapi.CreateContainerRequest{
					PodSandboxId: pod.ID, Config: harness.ContainerConfig("new", harness.Busybox, harness.Sleep()), SandboxConfig: pod.Config,
				})
				wantCode(t, "CreateContainer", err, codes.FailedPrecondition)
				_, err = d.ImageCRI().PullImage(ctx, &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: harness.Busybox}})
				wantCode(t, "PullImage", err, codes.FailedPrecondition)
				_, err = d.ImageCRI().ListImages(ctx, &runtimeapi.ListImagesRequest{})
				wantCode(t, "ListImages", err, codes.FailedPrecondition)
				if now, err := os.ReadFile(file); content != nil && (err != nil || string(now) != string(content)) {
					t.Errorf("the daemon changed the damaged file, error %v", err)
				}

				if err := os.WriteFile(file, right, 0o600); err != nil {
					t.Fatal(err)
				}
				wantReady(t, d)
				wantPod(t, d)
				if out := c.Must("cat", "/kept"); strings.TrimSpace(out) != "kept" {
					t.Errorf("the container's file after the repair: got %q, want kept", out)
				}
				d.AwaitRemovals()
				d.Stop()
				if err := before.Leaks(harness.Snapshot(d)); err != nil {
					t.Error(err)
				}
				if right, err = os.ReadFile(file); err != nil {
					t.Fatal(err)
				}
			})
		}
		d.Start()
	}
	c.Stop(5 * time.Second)
	pod.Remove()
}

// TestN6ImageIsDamaged: `tripod images verify` reports the missing parts of an image in use while the daemon runs, and
// a pull restores them. The container keeps running, and new containers start.
func TestN6ImageIsDamaged(t *testing.T) {
	d := harness.StartDaemon(t)
	bin, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	tripod := func(args ...string) (string, int) {
		c := exec.Command(bin, append(args, "--endpoint", d.Socket)...)
		out, _ := c.CombinedOutput() // the exit code is a result
		return string(out), c.ProcessState.ExitCode()
	}
	pod := d.RunPod(t, harness.PodConfig(t, "p"))
	c := pod.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
	if out, code := tripod("images", "verify"); code != 0 {
		t.Fatalf("images verify of an intact store: got exit code %d, want 0: %s", code, out)
	}
	for name, pattern := range map[string]string{"layer": "image/snapshots/snapshots/*/fs/bin", "blob": "image/content/blobs/sha256/*"} {
		paths, err := filepath.Glob(filepath.Join(d.Root, pattern))
		if err != nil || len(paths) == 0 {
			t.Fatalf("no files match %s, error %v", pattern, err)
		}
		for _, path := range paths {
			if name == "layer" { // remove the snapshot's whole directory
				path = filepath.Dir(filepath.Dir(path))
			}
			if err := os.RemoveAll(path); err != nil {
				t.Fatal(err)
			}
		}
		for _, args := range [][]string{{"images", "verify"}, {"images", "verify", "--quick"}} {
			if out, code := tripod(args...); code != 1 || !strings.Contains(out, name) || !strings.Contains(out, "missing") {
				t.Errorf("%v: got exit code %d, want 1 and a missing %s: %s", args, code, name, out)
			}
		}
		if out, err := exec.Command(bin, "check", "--images", "--config", d.ConfigPath()).CombinedOutput(); !strings.Contains(string(out),
			"image "+name) {
			t.Errorf("tripod check --images: got error %v and output without \"image %s\":\n%s", err, name, out)
		}
		if out, code := tripod("pull", harness.Busybox); code != 0 {
			t.Fatalf("pull: got exit code %d, want 0: %s", code, out)
		}
		if out, code := tripod("images", "verify"); code != 0 {
			t.Errorf("images verify after the pull: got exit code %d, want 0: %s", code, out)
		}
		if s := c.Status(); s.State != runtimeapi.ContainerState_CONTAINER_RUNNING {
			t.Errorf("status of the container: got %v, want running", s)
		}
		wantPod(t, d)
	}
	pod.Remove()
}

// TestN7RootIsNotMounted: if the disk with the root is not mounted, or another node's disk is, the daemon refuses to
// start, says what to do, and changes nothing. With the right disk it finds its pods, which have kept running.
func TestN7RootIsNotMounted(t *testing.T) {
	other := harness.StartDaemon(t)
	other.Stop()
	d := harness.NewDaemon(t)
	disk := d.Root + ".disk"
	mount := func(from string) (undo func()) {
		t.Helper()
		if err := unix.Mount(from, d.Root, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		return func() {
			t.Helper()
			if err := unix.Unmount(d.Root, unix.MNT_DETACH); err != nil { // detached, because containers use it
				t.Fatal(err)
			}
		}
	}
	if err := errors.Join(os.MkdirAll(disk, 0o700), os.MkdirAll(d.Root, 0o700)); err != nil {
		t.Fatal(err)
	}
	undo := mount(disk)
	d.Start()
	pod := d.RunPod(t, harness.PodConfig(t, "p"))
	c := pod.Run(harness.ContainerConfig("c", harness.Busybox, harness.Shell("i=0; while sleep 0.1; do i=$((i+1)); echo $i; done")))
	c.WaitLog("1")
	d.Stop()
	undo()
	refused := func(what, why string) {
		t.Helper()
		for range 2 { // the first refusal must not create files with which the second start succeeds
			before := len(d.DaemonLog())
			if err := d.TryStart(); err == nil {
				t.Fatalf("%s: the daemon started, want a refusal", what)
			}
			if log := d.DaemonLog()[before:]; !strings.Contains(log, why) {
				t.Errorf("%s: got a log without %q:\n%s", what, why, log)
			}
		}
	}
	refused("nothing is mounted", "Mount it and start again")
	undo = mount(other.Root)
	refused("another node's disk is mounted", "nothing was changed")
	undo()
	undo = mount(disk)
	defer undo()
	lines := len(c.Logs())
	d.Start()
	if s := c.Status(); s.State != runtimeapi.ContainerState_CONTAINER_RUNNING {
		t.Errorf("status of the container: got %v, want running", s)
	}
	harness.Eventually(t, 20*time.Second, func() error {
		if now := len(c.Logs()); now <= lines {
			return fmt.Errorf("lines in the container's log: got %d, want more than %d", now, lines)
		}
		return nil
	})
	pod.Remove()
	d.Stop()
}
