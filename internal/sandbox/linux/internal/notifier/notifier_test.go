package notifier

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/contrib/seccomp"
	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/test/harness/testns"
)

func TestMain(m *testing.M) {
	testns.Reenter()
	if testns.Inside() {
		os.Exit(m.Run())
	}
	os.Exit(testns.Run(append([]string{"/proc/self/exe"}, os.Args[1:]...), testns.Options{}))
}

func TestApply(t *testing.T) {
	errno := uint(38)
	filter := &specs.LinuxSeccomp{
		DefaultAction: specs.ActErrno,
		Syscalls: []specs.LinuxSyscall{
			{Names: []string{"read", "write", "mount"}, Action: specs.ActAllow},
			{Names: []string{"clone"}, Action: specs.ActAllow, Args: []specs.LinuxSeccompArg{{Index: 0, Value: 1, Op: specs.OpEqualTo}}},
			{Names: []string{"clone3"}, Action: specs.ActErrno, ErrnoRet: &errno},
			{Names: []string{"sendmsg"}, Action: specs.ActErrno},
		},
	}
	if err := Apply(filter, "/run/socket", "pod/c"); err != nil {
		t.Fatal(err)
	}
	notified := map[string]bool{}
	for _, rule := range filter.Syscalls {
		for _, name := range rule.Names {
			notified[name] = notified[name] || rule.Action == specs.ActNotify
		}
	}
	for name, want := range map[string]bool{
		"read": false, "mount": false, "clone": false, "clone3": true, "sendmsg": false, "close": false, "swapoff": true, "reboot": true,
	} {
		if notified[name] != want {
			t.Errorf("%s is notified: %v, want %v", name, notified[name], want)
		}
	}
	if filter.DefaultAction != specs.ActErrno || filter.ListenerPath != "/run/socket" || filter.ListenerMetadata != "pod/c" {
		t.Errorf("filter = %+v, want its own default action, and the listener", filter)
	}
	if err := Apply(filter, "/other", ""); !errdefs.IsInvalidArgument(err) {
		t.Errorf("Apply to a profile with a listener = %v, want ErrInvalidArgument", err)
	}
	open := &specs.LinuxSeccomp{DefaultAction: specs.ActAllow,
		Syscalls: []specs.LinuxSyscall{{Names: []string{"mount"}, Action: specs.ActErrno}}}
	if err := Apply(open, "/run/socket", ""); err != nil || len(open.Syscalls) != 1 || open.Syscalls[0].Action != specs.ActNotify {
		t.Errorf("Apply to a list of forbidden calls = %v, %+v, want a notification of mount only", err, open.Syscalls)
	}
}

// TestAcceptGoesOn: a failed accept, as without a free descriptor, does not end the listener.
func TestAcceptGoesOn(t *testing.T) {
	failed := make(lines, 10)
	l, err := Listen(filepath.Join(t.TempDir(), "socket"), func(Event) {}, slog.New(slog.NewTextHandler(failed, nil)))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := l.socket.SetDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	<-failed
	if err := l.socket.SetDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	conn, err := net.DialUnix("unix", nil, l.socket.Addr().(*net.UnixAddr))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := errors.Join(conn.CloseWrite(), conn.SetDeadline(time.Now().Add(30*time.Second))); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) { // the listener closes the connection
		t.Errorf("read: %v, want the end of the connection", err)
	}
}

// lines is a log. It drops what nobody reads.
type lines chan string

func (l lines) Write(p []byte) (int, error) {
	select {
	case l <- string(p):
	default:
	}
	return len(p), nil
}

// TestReceiveLongState: a state that arrives in pieces is read whole.
func TestReceiveLongState(t *testing.T) {
	socket, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "socket"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	raw, err := json.Marshal(specs.ContainerProcessState{Metadata: "pod/c", State: specs.State{ID: strings.Repeat("long", 100_000)}})
	if err != nil {
		t.Fatal(err)
	}
	sent := make(chan error, 1)
	go func() {
		conn, err := net.DialUnix("unix", nil, socket.Addr().(*net.UnixAddr))
		if err != nil {
			sent <- err
			return
		}
		defer conn.Close()
		n, _, err := conn.WriteMsgUnix(raw, unix.UnixRights(0), nil)
		if err == nil {
			_, err = conn.Write(raw[n:])
		}
		sent <- err
	}()
	conn, err := socket.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	state, file, err := receive(conn)
	if err := errors.Join(err, <-sent); err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if state.Metadata != "pod/c" || len(state.State.ID) != 400_000 {
		t.Errorf("metadata %q, ID of %d bytes; want those that were sent", state.Metadata, len(state.State.ID))
	}
}

// TestReal starts a container with the default profile under both OCI runtimes.
func TestReal(t *testing.T) {
	for _, runtime := range []string{"crun", "runc"} {
		t.Run(runtime, func(t *testing.T) {
			dir := t.TempDir()
			socket, events := filepath.Join(dir, "socket"), make(chan Event, 100)
			l, err := Listen(socket, func(e Event) { events <- e }, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			out, err := run(t, runtime, dir, socket)
			if err != nil {
				t.Fatalf("run the container: %v", err)
			}
			if !strings.Contains(out, "operation not permitted") || !strings.Contains(out, "still here") {
				t.Errorf("output: %q, want the error of swapoff, and the program to go on", out)
			}
			got := <-events
			if got.Syscall != "swapoff" || got.Metadata != "pod/c" || got.PID == 0 {
				t.Errorf("event = %+v, want swapoff of pod/c", got)
			}
			if len(events) != 0 {
				t.Errorf("another event: %+v", <-events)
			}
		})
	}
}

// run runs a program in a container that calls swapoff, and returns its output.
func run(t *testing.T, runtime, dir, socket string) (string, error) {
	t.Helper()
	root := filepath.Join(dir, "rootfs")
	for _, sub := range []string{"proc", "dev"} {
		if err := os.MkdirAll(filepath.Join(root, sub), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	compile := exec.Command("go", "build", "-o", filepath.Join(root, "forbidden"), "./testdata/forbidden")
	compile.Env = append(os.Environ(), "CGO_ENABLED=0") // nothing else is in the root file system
	if out, err := compile.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	caps := []string{"CAP_SYS_CHROOT"}
	id := fmt.Sprintf("tripod-notifier-%d-%s", os.Getpid(), runtime)
	config := &specs.Spec{
		Version: "1.0.2", Root: &specs.Root{Path: root},
		Process: &specs.Process{
			Args: []string{"/forbidden"}, Cwd: "/", NoNewPrivileges: true,
			Capabilities: &specs.LinuxCapabilities{Bounding: caps, Effective: caps, Permitted: caps},
		},
		Mounts: []specs.Mount{{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid"}}},
		Linux: &specs.Linux{
			CgroupsPath: filepath.Join("/", testns.Cgroup(), id),
			Namespaces: []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace},
				{Type: specs.MountNamespace}},
		},
	}
	config.Linux.Seccomp = seccomp.DefaultProfile(config)
	if err := Apply(config.Linux.Seccomp, socket, "pod/c"); err != nil {
		t.Fatal(err)
	}
	if names := config.Linux.Seccomp.Syscalls[len(config.Linux.Seccomp.Syscalls)-1].Names; !slices.Contains(names, "swapoff") {
		t.Fatalf("the default profile does not notify swapoff, only %v", names)
	}
	raw, err := json.Marshal(config)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "config.json"), raw, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(runtime, "--root", filepath.Join(dir, "state"), "run", "--bundle", dir, id)
	var out bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(""), &out, &out
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out.String())
	}
	return out.String(), nil
}
