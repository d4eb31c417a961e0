package e2e

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

// disk is a small file system in a file, for one of a daemon's directories.
type disk struct {
	dir string
	// filler is a file or directory that takes up the free space. below is the directory with the image of the disk.
	filler, below string
	// covered means that a read-only mount covers the disk.
	covered bool
}

// mountDisk creates dir and mounts a new disk on it.
func mountDisk(t *testing.T, dir string) *disk {
	t.Helper()
	// The disk's image is on its own tmpfs. If that is full, writes to the disk fail with EIO.
	below := filepath.Join(t.TempDir(), "below")
	d, image := &disk{dir: dir, filler: filepath.Join(dir, "filler"), below: below}, filepath.Join(below, "disk")
	if err := errors.Join(os.MkdirAll(below, 0o700), os.MkdirAll(dir, 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", below, "tmpfs", 0, "size=256m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, target := range []string{dir, below} {
			if err := unix.Unmount(target, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
				t.Error(err)
			}
		}
	})
	run(t, "truncate", "-s", "192M", image)
	// No journal, because with one the kernel stops using the file system permanently after the first error.
	run(t, "mkfs.ext4", "-q", "-m", "0", "-N", "6000", "-O", "^has_journal", image)
	run(t, "mount", "-o", "loop,errors=continue", image, dir)
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return d
}

func run(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %v: %v: %s", name, args, err, out)
	}
}

// diskFault is a fault of a disk.
type diskFault struct {
	name string
	// at are the directories to test with the fault.
	at []string
	// inject causes the fault, or increases it; heal removes it.
	inject, heal func(t *testing.T, d *disk)
	// lossy means that data written meanwhile is lost, including the file system's metadata.
	lossy bool
}

var diskFaults = []diskFault{
	{"ENOSPC", []string{"root", "images", "run", "logs"}, func(t *testing.T, d *disk) { fillBlocks(t, d.filler) },
		func(t *testing.T, d *disk) { removeAll(t, d.filler) }, false},
	{"inodes", []string{"root", "images", "run", "logs"}, fillInodes, func(t *testing.T, d *disk) { removeAll(t, d.filler) }, false},
	// Existing blocks can still be written.
	{
		"EIO", []string{"root", "images", "run", "logs"},
		func(t *testing.T, d *disk) { fillBlocks(t, filepath.Join(d.below, "filler")) },
		func(t *testing.T, d *disk) { removeAll(t, filepath.Join(d.below, "filler")) },
		true,
	},
	// test/crash tests a read-only root directory and image store.
	{"EROFS", []string{"run", "logs"}, readOnly, writable, false},
}

// readOnly makes a disk read-only. If files on it are open for writing, it is read-only only for files opened later.
func readOnly(t *testing.T, d *disk) {
	var fs unix.Statfs_t
	if err := unix.Statfs(d.dir, &fs); err != nil || fs.Flags&unix.ST_RDONLY != 0 {
		return
	}
	err := unix.Mount("", d.dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, "")
	if errors.Is(err, unix.EBUSY) {
		d.covered = true
		err = errors.Join(unix.Mount(d.dir, d.dir, "", unix.MS_BIND, ""),
			unix.Mount("", d.dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	}
	if err != nil {
		t.Fatal(err)
	}
}

func writable(t *testing.T, d *disk) {
	var err error
	if d.covered {
		err = unix.Unmount(d.dir, unix.MNT_DETACH)
	} else {
		err = unix.Mount("", d.dir, "", unix.MS_REMOUNT, "")
	}
	if err != nil {
		t.Error(err)
	}
}

func removeAll(t *testing.T, name string) {
	if err := os.RemoveAll(name); err != nil {
		t.Error(err)
	}
}

// fillBlocks writes to a file until no block is free.
func fillBlocks(t *testing.T, name string) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for chunk := 1 << 20; chunk >= 512; {
		if _, err := f.Write(make([]byte, chunk)); errors.Is(err, unix.ENOSPC) {
			chunk /= 2
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Sync(); err != nil && !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
}

// fillInodes creates files until no inode is free.
func fillInodes(t *testing.T, d *disk) {
	if err := os.MkdirAll(d.filler, 0o700); err != nil && !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	for {
		f, err := os.CreateTemp(d.filler, "")
		if errors.Is(err, unix.ENOSPC) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
}

// TestFaultN5Disk: while pods run, the disk under each of the node's directories is full (in blocks or inodes), fails,
// or is read-only. The daemon refuses new pods and images with a code other than Unknown, and stops and removes
// existing pods. After SIGKILL it starts, knows its pods, and stops and removes them. Once the disk is healed, it works
// again.
func TestFaultN5Disk(t *testing.T) {
	for _, fault := range diskFaults {
		for _, where := range fault.at {
			t.Run(where+" "+fault.name, func(t *testing.T) { testDisk(t, where, fault) })
		}
	}
}

func testDisk(t *testing.T, where string, fault diskFault) {
	base := filepath.Join(harness.Dir(), strings.NewReplacer("/", "-", " ", "-").Replace(t.Name()))
	dirs := map[string]string{"root": base + "/root", "images": base + "/root/image", "run": base + "/run", "logs": base + "/logs"}
	state := dirs["run"] + "/tripod"
	if err := os.MkdirAll(base, 0o700); err != nil {
		t.Fatal(err)
	}
	at := mountDisk(t, dirs[where])
	d := harness.StartDaemon(t, harness.Set("root", dirs["root"]), harness.Set("state", state),
		harness.Set("grpc.socket", state+"/tripod.sock"),
		func(d *harness.Daemon) { d.Root, d.State, d.Socket = dirs["root"], state, state+"/tripod.sock" })
	config := func(name string) *runtimeapi.PodSandboxConfig {
		c := harness.PodConfig(t, name)
		c.LogDirectory = filepath.Join(dirs["logs"], name)
		return c
	}
	container := func() *runtimeapi.ContainerConfig {
		return harness.ContainerConfig("c", harness.Busybox, harness.Shell("trap 'exit 3' TERM; echo up; while :; do sleep 0.1; done"))
	}
	type running struct {
		pod *harness.Pod
		c   *harness.Container
	}
	var pods []running
	for i := range 4 {
		p := d.RunPod(t, config(fmt.Sprintf("p%d", i)))
		c := p.Run(container())
		c.WaitLog("up")
		pods = append(pods, running{p, c})
	}
	fault.inject(t, at)
	healed := false
	heal := func() {
		if !healed {
			fault.heal(t, at)
			healed = true
		}
	}
	t.Cleanup(heal)

	ends := func(r running, what string) {
		t.Helper()
		must := func(call string, err error) {
			t.Helper()
			if err != nil {
				t.Errorf("%s: %s: %v", what, call, err)
			}
		}
		ctx := context.Background()
		_, err := d.CRI().StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: r.c.ID, Timeout: 10})
		must("StopContainer", err)
		s, err := d.CRI().ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: r.c.ID})
		must("ContainerStatus", err)
		if s.GetStatus().GetState() != runtimeapi.ContainerState_CONTAINER_EXITED || s.GetStatus().GetExitCode() != 3 {
			t.Errorf("%s: status: got %v, want exited with code 3", what, s.GetStatus())
		}
		_, err = d.CRI().RemoveContainer(ctx, &runtimeapi.RemoveContainerRequest{ContainerId: r.c.ID})
		must("RemoveContainer", err)
		_, err = d.CRI().StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: r.pod.ID})
		must("StopPodSandbox", err)
		_, err = d.CRI().RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: r.pod.ID})
		must("RemovePodSandbox", err)
	}
	wantsNew(t, d, config("new"), container())
	ends(pods[0], "running daemon")
	d.Kill()
	fault.inject(t, at) // because the removal has freed space
	if err := d.TryStart(); !d.Running() {
		t.Fatal(err)
	} else if err != nil {
		t.Logf("the daemon is not ready: %v", err)
	}
	if s := pods[1].c.Status(); s.State != runtimeapi.ContainerState_CONTAINER_RUNNING {
		t.Errorf("status after the restart: got %v, want running", s)
	}
	wantsNew(t, d, config("newer"), container())
	ends(pods[1], "restarted daemon")
	heal()
	harness.Eventually(t, 30*time.Second, func() error {
		resp, err := d.CRI().Status(t.Context(), &runtimeapi.StatusRequest{})
		if err != nil {
			return err
		}
		for _, c := range resp.GetStatus().GetConditions() {
			if !c.GetStatus() {
				return fmt.Errorf("condition after healing the disk: got %v, want true", c)
			}
		}
		return nil
	})
	if !fault.lossy {
		p := d.RunPod(t, config("last"))
		p.Run(container()).WaitLog("up")
	}
	pods[2].c.Must("true")
	d.Restart()
	ends(pods[2], "healed")
}

// wantsNew runs a pod with a container and pulls an image. Each call must succeed or fail with ResourceExhausted or
// Unavailable. It removes what it has created.
func wantsNew(t *testing.T, d *harness.Daemon, config *runtimeapi.PodSandboxConfig, c *runtimeapi.ContainerConfig) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ok := func(what string, err error) bool {
		t.Helper()
		t.Logf("%s: %v", what, err)
		switch status.Code(err) {
		case codes.OK, codes.ResourceExhausted, codes.Unavailable:
		default:
			t.Errorf("%s: got error %v, want success, ResourceExhausted or Unavailable", what, err)
		}
		if strings.Contains(status.Convert(err).Message(), "\n") {
			t.Errorf("%s: got error %q, want one line", what, err)
		}
		return err == nil
	}
	_, err := d.ImageCRI().PullImage(ctx, &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: harness.Nginx}})
	ok("PullImage", err)
	_ = os.MkdirAll(config.LogDirectory, 0o755)
	pod, err := d.CRI().RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: config})
	if !ok("RunPodSandbox", err) {
		return
	}
	created, err := d.CRI().CreateContainer(ctx,
		&runtimeapi.CreateContainerRequest{PodSandboxId: pod.PodSandboxId, Config: c, SandboxConfig: config})
	if ok("CreateContainer", err) {
		_, err = d.CRI().StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: created.ContainerId})
		ok("StartContainer", err)
	}
	_, err = d.CRI().StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: pod.PodSandboxId})
	if err != nil {
		t.Errorf("StopPodSandbox of the new pod: %v", err)
	}
	if _, err = d.CRI().RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: pod.PodSandboxId}); err != nil {
		t.Errorf("RemovePodSandbox of the new pod: %v", err)
	}
}
