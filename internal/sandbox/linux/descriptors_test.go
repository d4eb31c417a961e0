package linux

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/test/until"
)

// TestC9NoInodeOfTheHost: no descriptor of a container's process, of a program run by exec or of a pod's init process
// is an inode of the host, and no operation on a container changes the node's /dev/null. Each process also tries to
// change the mode of its descriptors from inside, as root.
func TestC9NoInodeOfTheHost(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		for name, change := range map[string]func(*runtimeapi.PodSandboxConfig){
			"node's users": func(*runtimeapi.PodSandboxConfig) {}, "user namespace": mapped,
		} {
			t.Run(name, func(t *testing.T) { testNoInodeOfTheHost(t, r, change) })
		}
	})
}

func testNoInodeOfTheHost(t *testing.T, r *rig, change func(*runtimeapi.PodSandboxConfig)) {
	null := statOf(t, "/dev/null") // the world's own
	check := func(what string, pids ...int) {
		t.Helper()
		for _, pid := range pids {
			inspect(t, what, pid)
		}
		if now := statOf(t, "/dev/null"); now != null {
			t.Errorf("%s: the node's /dev/null changed from %+v to %+v", what, null, now)
			null = now
		}
	}
	r.restart()
	check("the probe of the OCI runtime")
	p := r.pod(func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.SecurityContext.NamespaceOptions.Pid = runtimeapi.NamespaceMode_POD
	}, change)
	r.Backend.mu.Lock()
	pause := r.pauses[p.ID]
	r.Backend.mu.Unlock()
	waitProgram(t, pause.Pid, "/pause")
	check("the pod's init process", pause.Pid)

	const chmod = "/bin/busybox chmod 667 /proc/self/fd/* 2>/dev/null; "
	for name, change := range map[string]func(*runtimeapi.ContainerConfig){
		"without stdin": func(*runtimeapi.ContainerConfig) {},
		"stdin":         func(c *runtimeapi.ContainerConfig) { c.Stdin = true },
		"terminal":      func(c *runtimeapi.ContainerConfig) { c.Tty = true },
		"another user": func(c *runtimeapi.ContainerConfig) {
			c.Linux.SecurityContext.RunAsUser = &runtimeapi.Int64Value{Value: 4321}
		},
	} {
		c := p.container(chmod+forever, change).start()
		check("a container "+name, initPid(t, r, p, c))
		for i, req := range []sandbox.ExecRequest{
			{},
			{Stdout: &safeBuffer{}, Stderr: &safeBuffer{}},
			{Stdin: strings.NewReader("in"), Stdout: &safeBuffer{}},
			{TTY: true, Stdout: &safeBuffer{}},
		} {
			mark := strconv.Itoa(70000 + i)
			req.Cmd = []string{"/bin/sh", "-c", chmod + "sleep " + mark}
			ctx, end := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() {
				defer close(done)
				_, _ = r.Exec(ctx, p.Pod, c.Container, req)
			}()
			check(fmt.Sprintf("exec %d in a container %s", i, name), waitProcess(t, mark))
			end()
			<-done
		}
		c.stop(0)
	}
}

// owner is what a container could change about an inode.
type owner struct{ uid, gid, mode uint32 }

func statOf(t *testing.T, path string) owner {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return owner{st.Uid, st.Gid, st.Mode}
}

// inspect fails the test for each descriptor of a process that is not on one of the process's own mounts. Pipes,
// sockets and memory files are on no mount and belong to no other process.
func inspect(t *testing.T, what string, pid int) {
	t.Helper()
	var own []string
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		own = append(own, strings.Fields(line)[0])
	}
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) < 3 {
		t.Fatalf("%s: got descriptors %v, error %v; want at least three", what, entries, err)
	}
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil {
			continue // closed in the meantime
		}
		if strings.Contains(target, ":[") || strings.HasPrefix(target, "/memfd:") {
			continue
		}
		info, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, e.Name()))
		if err != nil {
			continue
		}
		if now, err := os.Readlink(filepath.Join(dir, e.Name())); err != nil || now != target {
			continue // a shell that redirects a command has another file there for a moment
		}
		_, rest, _ := strings.Cut(string(info), "mnt_id:")
		if mount := strings.Fields(rest)[0]; !slices.Contains(own, mount) {
			t.Errorf("%s: descriptor %s is %s on mount %s, want a mount of the container", what, e.Name(), target, mount)
		}
	}
}

// initPid waits until the OCI runtime has executed the container's program, and returns its PID.
func initPid(t *testing.T, r *rig, p *testPod, c *testContainer) int {
	t.Helper()
	_, l, err := r.ledger.GetRun(p.ID, c.ID)
	if err != nil {
		t.Fatal(err)
	}
	waitProgram(t, l.Init.Pid, c.Config.Command[0])
	return l.Init.Pid
}

// waitProgram waits until a process has executed the named program: the OCI runtime reports a start before that.
func waitProgram(t *testing.T, pid int, name string) {
	t.Helper()
	waitFor(t, "the program "+name, func() bool {
		raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		program, _, _ := strings.Cut(string(raw), "\x00")
		return program == name
	})
}

// waitFor polls a condition that no event reports.
var waitFor = until.Holds

// waitProcess waits for the sleep with this argument.
func waitProcess(t *testing.T, argument string) (found int) {
	t.Helper()
	waitFor(t, "sleep "+argument, func() bool {
		programs, err := filepath.Glob("/proc/[0-9]*/cmdline")
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range programs {
			if raw, _ := os.ReadFile(name); string(raw) == "sleep\x00"+argument+"\x00" {
				found, err = strconv.Atoi(filepath.Base(filepath.Dir(name)))
				return err == nil
			}
		}
		return false
	})
	return found
}
