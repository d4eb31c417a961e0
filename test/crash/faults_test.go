package crash

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/test/harness"
)

// pids returns the processes whose command lines contain all words.
func pids(t *testing.T, words ...string) []int {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	var found []int
next:
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		cmdline, _ := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		for _, word := range words {
			if !strings.Contains(string(cmdline), word) {
				continue next
			}
		}
		found = append(found, pid)
	}
	return found
}

// TestN2MonitorIsKilled: if conmon is killed, its container is ended with a reason, and other containers and the node
// keep running, even if the daemon was down.
func TestN2MonitorIsKilled(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.PodConfig(t, "p"))
	neighbour := pod.Run(harness.ContainerConfig("neighbour", harness.Busybox, harness.Sleep()))
	for _, away := range []bool{false, true} {
		t.Run(fmt.Sprintf("daemon away %v", away), func(t *testing.T) {
			c := pod.Run(harness.ContainerConfig(fmt.Sprintf("c-%v", away), harness.Busybox, harness.Shell("sleep 8765 & wait")))
			monitors := pids(t, "conmon", c.ID)
			if len(monitors) != 1 {
				t.Fatalf("monitors of the container: got %v, want one", monitors)
			}
			if away {
				d.Kill()
			}
			if err := syscall.Kill(monitors[0], syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			if away {
				d.Start()
			}
			s := c.WaitState(runtimeapi.ContainerState_CONTAINER_EXITED)
			if s.ExitCode == 0 || s.Message == "" {
				t.Errorf("status: got %v, want an exit code other than 0 and a message", s)
			}
			harness.Eventually(t, 10*time.Second, func() error {
				if left := pids(t, "sleep", "8765"); len(left) > 0 {
					return fmt.Errorf("processes of the container: got %v, want none", left)
				}
				return nil
			})
			neighbour.Must("true")
			c.Remove()
		})
	}
}

// TestN2InitProcessIsKilled: a pod whose PID namespace has lost its first process is not ready, and can be removed.
func TestN2InitProcessIsKilled(t *testing.T) {
	d := harness.StartDaemon(t)
	config, container := victim(t)
	pod := d.RunPod(t, config)
	c := pod.Run(container)
	inits := pids(t, "pause", "-P")
	if len(inits) != 1 {
		t.Fatalf("init processes: got %v, want one", inits)
	}
	if err := syscall.Kill(inits[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c.WaitState(runtimeapi.ContainerState_CONTAINER_EXITED)
	harness.Eventually(t, 10*time.Second, func() error {
		if s := pod.Status(); s.State != runtimeapi.PodSandboxState_SANDBOX_NOTREADY {
			return fmt.Errorf("state of the pod: got %s, want not ready", s.State)
		}
		return nil
	})
	pod.Remove()
}

// plugin writes a CNI plugin that is a shell script, and a network configuration that uses it.
func plugin(t *testing.T, dir, script string) {
	t.Helper()
	for name, text := range map[string]string{
		"bin/faulty":        "#!/bin/sh\n" + script + "\n",
		"net.d/10.conflist": `{"cniVersion":"1.0.0","name":"faulty","plugins":[{"type":"faulty"}]}`,
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path+".new", []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
}

// result is the script of a plugin that assigns an address.
const result = `echo '{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"'$CNI_NETNS'"}],"ips":[{"address":"192.0.2.7/24","interface":0}]}'`

// TestN4NetworkPluginMisbehaves: a pod whose ADD fails, hangs or prints junk is not created and leaves nothing. A pod
// whose DEL fails is released as soon as the plugin works, without another order.
func TestN4NetworkPluginMisbehaves(t *testing.T) {
	dir := filepath.Join(harness.Dir(), "faulty")
	t.Cleanup(func() { os.RemoveAll(dir) })
	plugin(t, dir, "exit 1")
	d := harness.StartDaemon(t, harness.Set("network.conf_dir", filepath.Join(dir, "net.d")),
		harness.Set("network.bin_dirs", []string{filepath.Join(dir, "bin")}), harness.Set("network.plugin_timeout", "2s"))
	before := harness.Snapshot(d)
	for name, script := range map[string]string{
		"fails":       `[ $CNI_COMMAND = ADD ] && { echo '{"code":11,"msg":"no address left"}'; exit 1; }; exit 0`,
		"hangs":       `[ $CNI_COMMAND = ADD ] && sleep 6543; exit 0`,
		"prints junk": `[ $CNI_COMMAND = ADD ] && echo junk; exit 0`,
	} {
		t.Run("ADD "+name, func(t *testing.T) {
			plugin(t, dir, script)
			_, err := d.CRI().RunPodSandbox(context.Background(), &runtimeapi.RunPodSandboxRequest{Config: harness.PodConfig(t, "p")})
			if code := status.Code(err); code == codes.OK || code == codes.Internal || code == codes.Unknown {
				t.Errorf("RunPodSandbox: got error %v (code %s), want another code than Internal and Unknown", err, code)
			}
			// The daemon's own checks, such as that of the accelerator, hold files for a moment.
			harness.Eventually(t, 10*time.Second, func() error { return before.Leaks(harness.Snapshot(d)) })
		})
	}
	t.Run("DEL fails for a while", func(t *testing.T) {
		ill := filepath.Join(dir, "ill")
		if err := os.WriteFile(ill, nil, 0o644); err != nil {
			t.Fatal(err)
		}
		plugin(t, dir, `case $CNI_COMMAND in ADD) `+result+`;; DEL) [ ! -e `+ill+` ];; esac`)
		pod := d.RunPod(t, harness.PodConfig(t, "p"))
		if _, err := d.CRI().StopPodSandbox(context.Background(), &runtimeapi.StopPodSandboxRequest{PodSandboxId: pod.ID}); err == nil {
			t.Error("StopPodSandbox with a failing DEL succeeded, want an error")
		}
		if s := pod.Status(); s.State != runtimeapi.PodSandboxState_SANDBOX_NOTREADY {
			t.Errorf("state of the pod: got %s, want not ready", s.State)
		}
		if err := os.Remove(ill); err != nil {
			t.Fatal(err)
		}
		harness.Eventually(t, 30*time.Second, func() error { return noNetns(d) })
		pod.Remove()
	})
}

// noNetns returns an error if the daemon has a network namespace.
func noNetns(d *harness.Daemon) error {
	entries, err := os.ReadDir(filepath.Join(d.State, "netns"))
	if err == nil && len(entries) > 0 {
		err = fmt.Errorf("network namespaces: got %v, want none", entries)
	}
	return err
}

// TestN8StuckRuntime: while the OCI runtime hangs for one pod, lists, status calls and other pods work.
func TestN8StuckRuntime(t *testing.T) {
	dir := filepath.Join(harness.Dir(), "stuck")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	// The wrapper hangs in "create" for the container that the file "victim" names.
	wrapper := filepath.Join(dir, "crun")
	script := fmt.Sprintf("#!/bin/sh\nv=$(cat %s/victim 2>/dev/null)\ncase \"$*\" in *create*\"$v\"*) [ -n \"$v\" ] && sleep 7654;; esac\nexec /usr/bin/crun \"$@\"\n", dir)
	if err := os.WriteFile(wrapper, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	d := harness.StartDaemon(t, harness.Set("linux.runtime", wrapper))
	stuck, fine := d.RunPod(t, harness.PodConfig(t, "stuck")), d.RunPod(t, harness.PodConfig(t, "fine"))
	c := stuck.Create(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
	if err := os.WriteFile(filepath.Join(dir, "victim"), []byte(c.ID), 0o644); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	started := make(chan error, 1)
	go func() {
		_, err := d.CRI().StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: c.ID})
		started <- err
	}()
	harness.Eventually(t, 10*time.Second, func() error {
		if len(pids(t, "sleep", "7654")) == 0 {
			return errors.New("the runtime does not hang yet")
		}
		return nil
	})
	other := fine.Run(harness.ContainerConfig("other", harness.Busybox, harness.Sleep()))
	other.Must("true")
	for range 50 { // a call that waits for the stuck pod would time out
		call, done := context.WithTimeout(context.Background(), 5*time.Second)
		for what, err := range map[string]error{
			"ListPodSandbox":  second(d.CRI().ListPodSandbox(call, &runtimeapi.ListPodSandboxRequest{})),
			"ListContainers":  second(d.CRI().ListContainers(call, &runtimeapi.ListContainersRequest{})),
			"ContainerStatus": second(d.CRI().ContainerStatus(call, &runtimeapi.ContainerStatusRequest{ContainerId: c.ID})),
			"PodSandboxStats": second(d.CRI().ListPodSandboxStats(call, &runtimeapi.ListPodSandboxStatsRequest{})),
		} {
			if err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
		done()
	}
	cancel()
	<-started
	stuck.Remove() // ends the start, which still hangs
	fine.Remove()
	for _, pid := range pids(t, "sleep", "7654") {
		t.Errorf("process %d of the stuck start still runs", pid)
	}
}

// second returns the second result of a call, its error.
func second[T any](_ T, err error) error { return err }

// TestN1DuringPull: after a crash at any fail point of a pull, the daemon starts and pulls the image. The tests of
// internal/image visit the fail points of disk images, root disks and downloads.
func TestN1DuringPull(t *testing.T) {
	names := points(t, "image.")
	for _, prefix := range []string{"image.disk.", "image.rootdisk.", "image.download."} {
		names = without(names, prefix)
	}
	for _, point := range names {
		t.Run(point, func(t *testing.T) {
			d := harness.NewDaemon(t)
			d.Start(failpoint.Variable + "=" + point + "=kill")
			ctx := context.Background()
			image := &runtimeapi.ImageSpec{Image: harness.Busybox}
			_, err := d.ImageCRI().PullImage(ctx, &runtimeapi.PullImageRequest{Image: image})
			if err == nil {
				_, err = d.ImageCRI().RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: image})
			}
			if s := d.WaitExit(10 * time.Second).Sys().(syscall.WaitStatus); s.Signal() != syscall.SIGKILL {
				t.Fatalf("the daemon ended with %v, the calls with error %v; want SIGKILL at the fail point", s, err)
			}
			d.Start()
			pod := d.RunPod(t, harness.PodConfig(t, "p"))
			pod.Run(harness.ContainerConfig("c", harness.Busybox, harness.Shell("exit 0"))).WaitExit(0)
			pod.Remove()
		})
	}
	if len(names) < 3 {
		t.Errorf("fail points visited: got %d, want at least 3", len(names))
	}
}
