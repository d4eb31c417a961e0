package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// load makes calls of several kinds until the test ends, each kind again and again.
type load struct {
	t     *testing.T
	kinds []*loadKind
	wg    sync.WaitGroup
}

type loadKind struct {
	name string
	mu   sync.Mutex
	done int // successful calls
	errs []error
}

// add begins calls of a kind. Errors with a code of borne are those that its client bears.
func (l *load) add(name string, call func(context.Context) error, borne ...codes.Code) {
	k := &loadKind{name: name}
	l.kinds = append(l.kinds, k)
	l.wg.Go(func() {
		for l.t.Context().Err() == nil {
			k.once(l.t.Context(), call, borne)
			time.Sleep(30 * time.Millisecond) // pacing of the load
		}
	})
}

func (k *loadKind) once(ctx context.Context, call func(context.Context) error, borne []codes.Code) {
	timed, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	err := call(timed)
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, code := range borne {
		if codeOf(err) == code {
			return
		}
	}
	switch {
	case err == nil:
		k.done++
	case ctx.Err() == nil:
		k.errs = append(k.errs, err)
	}
}

func (k *loadKind) calls() (done int, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.done, errors.Join(k.errs...)
}

// more waits until calls of each of the first n kinds have succeeded again, and checks that no call has failed.
func (l *load) more(n int) {
	l.t.Helper()
	for _, k := range l.kinds[:n] {
		before, _ := k.calls()
		harness.Eventually(l.t, 2*waitLimit, func() error {
			now, err := k.calls()
			if err != nil {
				l.t.Fatalf("%s: after %d calls: %v", k.name, now, err)
			}
			if now < before+3 {
				return fmt.Errorf("%s: got %d calls, want 3 more than %d", k.name, now, before)
			}
			return nil
		})
	}
}

// upgraded is a node with pods of all kinds under load.
type upgraded struct {
	*harness.Daemon
	t                  *testing.T
	web, shell, leaves *harness.Container // of one pod
	machine, component *harness.Container
	service            *served
	requests, kubelets load
	release            string // a file that ends the container leaves
	started            map[*harness.Container]int64
}

// startUpgraded runs the pods and begins the load. Only the calls of a kubelet can fail, with the code borne.
func startUpgraded(t *testing.T, d *harness.Daemon, borne ...codes.Code) *upgraded {
	t.Helper()
	u := &upgraded{Daemon: d, t: t, started: map[*harness.Container]int64{}}
	dir := t.TempDir()
	u.release = filepath.Join(dir, "now")
	u.machine = d.RunVM(t, &harness.PodSpec{Image: harness.Guest})
	u.component, u.service = startComponent(t, d, harness.GreeterC, greeter)
	p := d.RunPod(t, harness.PodConfig(t, "linux"))
	u.web = p.Run(harness.ContainerConfig("web", harness.Nginx))
	u.shell = p.Run(harness.ContainerConfig("shell", harness.Busybox,
		harness.Shell("nc -ll -p 8080 -e cat & i=0; while usleep 5000; do echo $i; i=$((i+1)); done")))
	u.leaves = p.Run(harness.ContainerConfig("leaves", harness.Busybox, harness.Shell("until test -e /go/now; do usleep 10000; done; exit 3"),
		mounts(&runtimeapi.Mount{HostPath: dir, ContainerPath: "/go"})))
	u.machine.WaitGuest()
	waitAgent(t, d, u.machine)
	for _, c := range []*harness.Container{u.machine, u.component, u.web, u.shell} {
		u.started[c] = c.Status().StartedAt
	}
	u.beginLoad(borne)
	return u
}

func (u *upgraded) beginLoad(borne []codes.Code) {
	u.t.Helper()
	u.requests.t, u.kubelets.t = u.t, u.t
	u.t.Cleanup(func() { u.requests.wg.Wait(); u.kubelets.wg.Wait() })
	for name, pod := range map[string]*harness.Pod{"page of a Linux pod": u.web.Pod, "page of a machine": u.machine.Pod} {
		pod.Get("/") // until it serves
		url := "http://" + pod.IP()
		u.requests.add(name, func(ctx context.Context) error {
			_, err := harness.Fetch(ctx, harness.Reconnecting, url)
			return err
		})
	}
	u.service.until(greeter+"/SayHello", `{"name":"Ada"}`)
	u.requests.add("call of a component", func(ctx context.Context) error {
		_, err := u.service.try(ctx, greeter+"/SayHello", `{"name":"Ada"}`)
		return err
	})

	// With the connection parameters of a kubelet's client.
	conn, err := grpc.NewClient("unix://"+u.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		u.t.Fatal(err)
	}
	u.t.Cleanup(func() { conn.Close() })
	cri := runtimeapi.NewRuntimeServiceClient(conn)
	u.kubelets.add("lists", func(ctx context.Context) error {
		pods, err := cri.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
		if err == nil && len(pods.Items) != 3 {
			err = fmt.Errorf("got %d pods, want 3", len(pods.Items))
		}
		return err
	}, borne...)
	for _, c := range []*harness.Container{u.machine, u.component, u.shell} {
		name := c.Pod.Config.GetMetadata().GetName()
		u.kubelets.add("status of "+name, func(ctx context.Context) error {
			s, err := cri.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: c.ID})
			if err == nil && (s.Status.State != running || s.Status.StartedAt != u.started[c]) {
				err = fmt.Errorf("got status %v, want running since %d", s.Status, u.started[c])
			}
			return err
		}, borne...)
		u.kubelets.add("statistics of "+name, func(ctx context.Context) error {
			_, err := cri.ContainerStats(ctx, &runtimeapi.ContainerStatsRequest{ContainerId: c.ID})
			return err
		}, borne...)
		if c == u.component {
			continue // has no programs
		}
		u.kubelets.add("probe of "+name, func(ctx context.Context) error {
			_, err := cri.ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"true"}, Timeout: 30})
			return err
		}, borne...)
	}
	u.goOn()
}

// goOn checks that all calls go on, and that none has failed.
func (u *upgraded) goOn() {
	u.t.Helper()
	u.requests.more(len(u.requests.kinds))
	u.kubelets.more(len(u.kubelets.kinds))
}

// replace replaces the daemon by another build. In between, the pods serve, and the container leaves ends.
func (u *upgraded) replace(program string) {
	u.t.Helper()
	u.Stop()
	if err := os.WriteFile(u.release, nil, 0o600); err != nil {
		u.t.Fatal(err)
	}
	u.requests.more(len(u.requests.kinds))
	u.Program(program)
	u.Start()
	u.goOn()
}

// build copies tripod, so that a carrier takes it for another build. harness.VM has built the agent.
func build(t *testing.T) (program string) {
	t.Helper()
	bin, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(bin)
	if err != nil {
		t.Fatal(err)
	}
	dir, agent := t.TempDir(), os.Getenv("TRIPOD_AGENT_BIN")
	program = filepath.Join(dir, "tripod")
	if err := errors.Join(os.WriteFile(program, content, 0o755), os.Symlink(agent, filepath.Join(dir, "tripod-agent"))); err != nil {
		t.Fatal(err)
	}
	return program
}

// TestFaultN9UpgradeUnderLoad: another build replaces the daemon, and is replaced again. No request to a pod of any kind
// and no call of a kubelet fails, nothing restarts, an exit in between is reported, and no session notices: the carrier of
// each build serves its sessions to their end.
func TestFaultN9UpgradeUnderLoad(t *testing.T) {
	d := harness.NewDaemon(t, harness.Wasm(t, "node"), harness.VM(t), harness.Systemd(t))
	one, other := build(t), build(t)
	d.Program(one)
	d.Start()
	u := startUpgraded(t, d)
	watch, events := tripod(t, d, "events", "-w"), &buffer{}
	follow, log := tripod(t, d, "logs", "-f", u.shell.ID), &buffer{}
	watch.Stdout, follow.Stdout = events, log
	for _, c := range []*exec.Cmd{watch, follow} {
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = c.Process.Kill()
			_ = c.Wait()
		})
	}
	sessions := []*session{
		startSession(t, harness.SPDY, execURL(t, d, u.shell, true, "sh"), true),
		startSession(t, harness.WebSocket, execURL(t, d, u.machine, true, "sh"), true),
	}
	attached := startSession(t, harness.WebSocket, u.shell.AttachURL(false, false), false)
	forwarded := u.shell.Pod.Forward(t, 8080)
	tr := forwardTransfer(t, forwarded, transferred/10)
	progress := func(step int) {
		t.Helper()
		for _, s := range sessions {
			s.sizes <- &remotecommand.TerminalSize{Width: 100, Height: uint16(50 + step)}
			s.send(fmt.Sprintf("until [ \"$(stty size)\" = '%d 100' ]; do sleep 0.1; done; echo size-$((50+%d))\n", 50+step, step))
			s.stdout.wait(t, fmt.Sprintf("size-%d", 50+step))
		}
		for _, out := range []*buffer{&attached.stdout, log} {
			before := counted(t, out.String())
			harness.Eventually(t, waitLimit, func() error {
				if now := counted(t, out.String()); now < before+20 {
					return fmt.Errorf("last line: got %d, want at least %d", now, before+20)
				}
				return nil
			})
		}
		wantEcho(t, forwarded)
	}
	progress(0)
	<-tr.gates[0].reached
	first := d.Carrier()

	u.replace(other)
	u.leaves.WaitExit(3)
	wantStopped(t, events, "leaves")
	close(tr.gates[0].open)
	sessions = append(sessions, startSession(t, harness.SPDY, execURL(t, d, u.shell, true, "sh"), true))
	progress(1)
	if got := d.Carriers(); len(got) != 2 {
		t.Errorf("session carriers after the upgrade: got %v, want %d and one of the new build", got, first)
	}
	<-tr.gates[1].reached

	u.replace(one)
	progress(2)
	close(tr.gates[1].open)
	tr.wait(t)
	for _, s := range sessions {
		s.send("exit 7\n")
		s.wait(7)
	}
	u.goOn()
}

// wantStopped waits for the event of a container's end.
func wantStopped(t *testing.T, events *buffer, container string) {
	t.Helper()
	harness.Eventually(t, waitLimit, func() error {
		for _, line := range lines(events.String()) {
			if cells := strings.Fields(line); len(cells) == 4 && cells[1] == "stopped" && cells[3] == container {
				return nil
			}
		}
		return fmt.Errorf("events: got %q, want the end of %s", events.String(), container)
	})
}

// TestFaultN9UpgradeFromEarlier: this build replaces that of an earlier commit under load. Its daemon does not store its
// socket, so that calls fail as long as none runs. Afterwards everything works in the earlier pods, which are removed.
func TestFaultN9UpgradeFromEarlier(t *testing.T) {
	for _, commit := range []string{"f37ce677", "02174822"} {
		t.Run(commit, func(t *testing.T) { upgradeFrom(t, harness.Earlier(t, commit)) })
	}
}

// upgradeFrom replaces an earlier tripod by the present one while pods of all kinds run.
func upgradeFrom(t *testing.T, earlier string) {
	t.Helper()
	beside := func(program string) string { return filepath.Join(filepath.Dir(earlier), program) }
	wasm, vm := harness.Wasm(t, "node"), harness.VM(t)
	d := harness.NewDaemon(t, wasm, vm, harness.Unset("cdi"), harness.Unset("nri"), harness.Set("wasm.program", beside("tripod-wasm")))
	d.Program(earlier)
	d.Start("TRIPOD_AGENT_BIN=" + beside("tripod-agent"))
	u := startUpgraded(t, d, codes.Unavailable)
	d.Reconfigure(wasm)
	u.replace("")
	u.leaves.WaitExit(3)
	u.goOn()
	for _, c := range []*harness.Container{u.shell, u.machine} {
		if got := c.Exec(harness.SPDY, nil, true, "echo", "hello"); got.Stdout != "hello\r\n" {
			t.Errorf("exec in a pod of the earlier build: got %+v, want hello", got)
		}
	}
}
