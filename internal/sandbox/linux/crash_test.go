package linux

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// victimEnv turns the test binary into a process that takes a pod through its life and dies at a fail point.
const victimEnv = "TRIPOD_TEST_VICTIM"

// victim holds that process's parameters.
type victim struct {
	Root, RunDir, Runtime, CgroupParent, Images string
	PodID, ContainerID                          string
	Pod                                         *runtimeapi.PodSandboxConfig
	Container                                   *runtimeapi.ContainerConfig
}

func (v victim) pod() *sandbox.Pod { return &sandbox.Pod{ID: v.PodID, Config: v.Pod} }
func (v victim) container() *sandbox.Container {
	return &sandbox.Container{ID: v.ContainerID, Config: v.Container, ImageID: busybox}
}

// live takes the pod through its whole life.
func (v victim) live() error {
	ctx, p, c := context.Background(), v.pod(), v.container()
	b, err := Open(ctx, Config{Root: v.Root, RunDir: v.RunDir, Runtime: v.Runtime, CgroupParent: v.CgroupParent},
		Services{Images: openFakeImages(v.Images)})
	if err != nil {
		return err
	}
	for _, step := range []func() error{
		func() error { return b.CreateSandbox(ctx, p) },
		func() error { _, err := b.CreateContainer(ctx, p, c); return err },
		func() error { return b.StartContainer(ctx, p, c) },
		func() error { return b.StopContainer(ctx, p, c, 0) },
		func() error { return b.RemoveContainer(ctx, p, c) },
		func() error { return b.StopSandbox(ctx, p) },
		func() error { return b.RemoveSandbox(ctx, p) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return errors.New("the victim reached no fail point")
}

// TestN1CrashMatrix kills a process that uses the backend, at every fail point. A new backend then finds the container
// in its true state and can remove it. If the record does not contain the pod, the backend removes everything itself.
func TestN1CrashMatrix(t *testing.T) {
	failpoint.Needed(t)
	for _, point := range failpoint.Names() {
		if !strings.HasPrefix(point, "linux.") {
			continue
		}
		t.Run(point, func(t *testing.T) {
			for _, c := range []struct{ known, users bool }{{true, false}, {false, false}, {true, true}, {false, true}} {
				if point == "linux.create-sandbox.users" && !c.users {
					continue
				}
				known, r := c.known, newRig(t, "crun")
				v := r.victim()
				if c.users {
					mapped(v.Pod)
					mappedVolume(t.TempDir(), "/dir")(v.Container)
				}
				r.die(v, point)
				if !known {
					r.restart()
					continue
				}
				found := r.restart(sandbox.Known{Pod: v.pod(), Containers: []*sandbox.Container{v.container()}})
				if s := found.Containers[v.ContainerID]; s.State == sandbox.StateRunning && syscall.Kill(s.Pid, 0) != nil {
					t.Errorf("Recover reports the container as running, but process %d does not exist: %+v", s.Pid, s)
				}
				for range 2 {
					if err := errors.Join(r.RemoveContainer(t.Context(), v.pod(), v.container()), r.StopSandbox(t.Context(), v.pod()),
						r.RemoveSandbox(t.Context(), v.pod())); err != nil {
						t.Fatal(err)
					}
				}
			}
		})
	}
}

func (r *rig) victim() victim {
	return victim{
		Root: r.cfg.Root, RunDir: r.cfg.RunDir, Runtime: r.cfg.Runtime, CgroupParent: r.cfg.CgroupParent, Images: r.images.dir,
		PodID: newID(), ContainerID: newID(),
		Pod: &runtimeapi.PodSandboxConfig{
			Metadata: &runtimeapi.PodSandboxMetadata{Name: "victim"}, Hostname: "victim", LogDirectory: filepath.Join(r.tb.TempDir(), "logs"),
			Linux: &runtimeapi.LinuxPodSandboxConfig{
				Resources: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20},
				SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
					NamespaceOptions: &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE, Pid: runtimeapi.NamespaceMode_POD},
				}},
		},
		Container: &runtimeapi.ContainerConfig{
			Metadata: &runtimeapi.ContainerMetadata{Name: "c"}, Image: &runtimeapi.ImageSpec{Image: busybox},
			Command: []string{"/bin/sleep", "1000"}, LogPath: "c.log",
			Mounts: []*runtimeapi.Mount{{ContainerPath: "/vol", Image: &runtimeapi.ImageSpec{Image: busybox}, Readonly: true}},
		},
	}
}

// die runs the victim until it dies at the fail point.
func (r *rig) die(v victim, point string) {
	r.tb.Helper()
	raw, err := json.Marshal(v)
	if err != nil {
		r.tb.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), victimEnv+"="+string(raw), failpoint.Variable+"="+point+"=kill")
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		r.tb.Fatalf("end of the victim: got %v, want SIGKILL: %s", err, out)
	}
}
