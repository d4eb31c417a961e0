package program

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/test/races"
)

// daemonMain is a daemon that starts a pod with its descriptors, prints "started", and waits to be killed.
//
//	descriptor 3: the code, 4: a TCP socket, 5: the log; standard input: the descriptors
func daemonMain() {
	must := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	set, err := io.ReadAll(os.Stdin)
	must(err)
	ctx := context.Background()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: os.Getenv(asDaemon)})
	must(err)
	c, err := workerapi.NewClient(ctx, conn)
	must(err)
	file := func(fd uintptr) workerapi.File { return workerapi.File{File: os.NewFile(fd, "inherited")} }
	_, err = c.Load(ctx, workerapi.Code{Digest: "d", Image: file(3), Descriptors: set})
	must(err)
	_, err = c.Start(ctx, workerapi.PodSpec{ID: "orphan", Digest: "d", Log: file(5),
		Ports: []workerapi.Port{{Kind: workerapi.PortCleartext, Socket: file(4)}}})
	must(err)
	fmt.Println("started")
	<-c.Done()
}

// TestDaemonIsKilled checks that open streams survive the daemon, and that the next daemon finds the pods and the exits
// in the meantime.
func TestDaemonIsKilled(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	r.Client.Close()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &pod{Status: workerapi.Status{ID: "orphan"}, rig: r, log: filepath.Join(t.TempDir(), "0.log"),
		cleartext: l.Addr().(*net.TCPAddr).AddrPort()}
	self, err := os.Executable()
	require.NoError(t, err)
	daemon := exec.Command(self)
	daemon.Env = []string{asDaemon + "=" + r.controlPath(), races.Env()}
	daemon.Stdin = strings.NewReader(string(descriptors(t, examples+"faults-c/faults.proto")))
	daemon.Stderr = os.Stderr
	daemon.ExtraFiles = []*os.File{codeFile(t, examples+"faults-c/faults-c.wasm"), fileOf(t, l.(*net.TCPListener)).File, openLog(t, p.log)}
	daemon.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	out, err := daemon.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, daemon.Start())
	l.Close()
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "started\n", line)

	mirror := p.faults().stream(t.Context(), "Mirror")
	exchange := func() {
		t.Helper()
		require.NoError(t, mirror.send(`{"data":"AAEC"}`))
		reply, err := mirror.receive()
		require.NoError(t, err)
		require.Equal(t, "AAEC", reply["data"])
	}
	exchange()
	require.NoError(t, daemon.Process.Kill())
	_ = daemon.Wait()
	exchange()

	r.Client = r.connect()
	require.Equal(t, workerapi.StateRunning, list(t, r, "orphan").State)
	exchange()
	p.faults().must("Print", `{"stdout":"still logging"}`)
	require.Contains(t, p.logged("stdout"), "still logging")
	require.NoError(t, mirror.CloseSend())
	_, err = mirror.receive()
	require.Equal(t, io.EOF, err)

	// A pod exits without a daemon.
	c := r.command(nil, "sleep", "100ms", "exit", "7")
	r.Client.Close()
	r.Client = r.connect()
	eventually(t, "the exit status is kept", func() bool { return list(t, r, c.ID).ExitCode == 7 })
	require.NoError(t, r.Remove(t.Context(), c.ID))
	require.Empty(t, list(t, r, c.ID).ID)
}

func TestStopDrains(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	for name, over := range map[string]bool{"own sockets": false, "router": true} {
		t.Run(name, func(t *testing.T) {
			p := r.serve("faults-c")
			s := p.faults()
			if over {
				s = newService(t, p.overRouter(), examples+"faults-c/faults.proto", "faults.v1.Faults")
			}
			mirror := s.stream(t.Context(), "Mirror")
			require.NoError(t, mirror.send(`{"data":"AAEC"}`))
			_, err := mirror.receive()
			require.NoError(t, err)
			stopped := make(chan workerapi.Status, 1)
			go func() {
				st, err := r.Stop(t.Context(), p.ID, time.Minute)
				if err != nil {
					t.Error(err)
				}
				stopped <- st
			}()
			eventually(t, "no connection is taken any more", func() bool {
				conn, err := net.Dial("tcp", p.cleartext.String())
				if err == nil {
					conn.Close()
				}
				return err != nil
			})
			require.NoError(t, mirror.send(`{"data":"AAEC"}`)) // the open stream continues
			_, err = mirror.receive()
			require.NoError(t, err)
			require.NoError(t, mirror.CloseSend())
			_, err = mirror.receive()
			require.Equal(t, io.EOF, err)
			st := <-stopped
			require.Equal(t, workerapi.StateExited, st.State)
			require.Equal(t, "Completed", st.Reason)
			require.Zero(t, st.ExitCode)
			require.Equal(t, st.FinishedAt.UnixNano(), p.exit().FinishedAt.UnixNano())
		})
	}
}

func TestStopCutsAfterTheGrace(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	for _, c := range []struct {
		method, request string
		router          bool
	}{{"Mirror", `{"data":"AA=="}`, false}, {"Mirror", `{"data":"AA=="}`, true}, {"Tick", `{"interval_ms":10}`, false},
		{"Tick", `{"interval_ms":10}`, true}} {
		t.Run(fmt.Sprint(c.method, c.router), func(t *testing.T) {
			p := r.serve("faults-c")
			s := p.faults()
			if c.router {
				s = newService(t, p.overRouter(), examples+"faults-c/faults.proto", "faults.v1.Faults")
			}
			st := s.stream(t.Context(), c.method)
			require.NoError(t, st.send(c.request))
			_, err := st.receive()
			require.NoError(t, err)
			go func() { _, _ = r.Stop(t.Context(), p.ID, time.Hour) }()
			begun := time.Now()
			ended, err := r.Stop(t.Context(), p.ID, 100*time.Millisecond) // shortens the grace period of the first Stop
			require.NoError(t, err)
			require.Less(t, time.Since(begun), 5*time.Second)
			require.Equal(t, int32(137), ended.ExitCode)
			require.Equal(t, "Error", ended.Reason)
			for err == nil {
				_, err = st.receive()
			}
			require.Contains(t, []codes.Code{codes.Unavailable, codes.Canceled, codes.Internal}, status.Code(err), "%v", err)
			require.Zero(t, p.stats().Instances)
		})
	}
}

// TestRestart checks that an exited pod can be started again with the same ID and addresses.
func TestRestart(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	p := r.serve("greeter-c")
	_, err := r.Start(t.Context(), workerapi.PodSpec{ID: p.ID, Digest: p.Digest})
	require.True(t, errdefs.IsAlreadyExists(err), "%v", err)
	_, err = r.Stop(t.Context(), p.ID, 0)
	require.NoError(t, err)
	again := r.serve("greeter-c", func(s *workerapi.PodSpec) { s.ID = p.ID })
	again.greeter().must("SayHello", `{"name":"Ada"}`)
	require.NoError(t, r.Kill(t.Context(), p.ID))
	require.NoError(t, r.Kill(t.Context(), p.ID))
	require.NoError(t, r.Remove(t.Context(), p.ID))
	require.NoError(t, r.Remove(t.Context(), p.ID))
	require.NoError(t, r.Kill(t.Context(), p.ID))
	_, err = r.Stop(t.Context(), p.ID, 0)
	require.True(t, errdefs.IsNotFound(err), "%v", err)
	require.NoError(t, r.Unload(t.Context(), p.Digest))
	_, err = r.Start(t.Context(), workerapi.PodSpec{ID: p.ID, Digest: p.Digest})
	require.True(t, errdefs.IsNotFound(err), "%v", err)
}

func TestTLSIsReplaced(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	p := r.serve("greeter-c")
	url := "https://" + p.tls.String() + "/greet.v1.Greeter/SayHello"
	old := p.overHTTP3()
	code, _, _ := post(t, old, url, `{"name":"Ada"}`)
	require.Equal(t, http.StatusOK, code)
	before := *p
	var err error
	p.material, err = dataplane.SelfSigned([]string{"localhost"}, []netip.Addr{p.tls.Addr()})
	require.NoError(t, err)
	require.NoError(t, r.UpdateTLS(t.Context(), p.ID, workerapi.TLS{Certificate: p.material.Certificate, Key: p.material.Key}))
	code, _, _ = post(t, old, url, `{"name":"Ada"}`) // over the open connection
	require.Equal(t, http.StatusOK, code)
	code, _, _ = post(t, p.overHTTP3(), url, `{"name":"Ada"}`)
	require.Equal(t, http.StatusOK, code)
	_, err = before.overHTTP3().Get(url)
	require.ErrorContains(t, err, "certificate")
	err = r.UpdateTLS(t.Context(), p.ID, workerapi.TLS{Certificate: []byte("junk")})
	require.True(t, errdefs.IsInvalidArgument(err), "%v", err)
}

func TestTermination(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	p := r.serve("greeter-c")
	c := r.command(nil, "spin")
	require.NoError(t, r.process.Signal(syscall.SIGTERM))
	seen := map[string]int32{}
	for e := range r.Events() {
		if e.Exited != nil {
			seen[e.Exited.ID] = e.Exited.ExitCode
		}
	}
	<-r.exited
	require.Equal(t, 0, r.state.ExitCode(), r.logText())
	require.Equal(t, map[string]int32{p.ID: 0, c.ID: 137}, seen)
}

// TestWorkerIsLockedDown inspects a worker from outside. Package lockdown tests what a worker cannot do.
func TestWorkerIsLockedDown(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	r.serve("greeter-c").greeter().must("SayHello", `{"name":"Ada"}`)
	require.Equal(t, r.process.Pid, r.Hello().Pid)
	inner, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.process.Pid))
	require.NoError(t, err)
	require.Regexp(t, `(?m)^NSpid:.*\t1$`, string(inner), "the worker must be the first process of its PID namespace")
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", r.process.Pid))
	require.NoError(t, err)
	for _, task := range tasks {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/status", r.process.Pid, task.Name()))
		require.NoError(t, err)
		for _, want := range []string{
			"Uid:\t65532\t65532\t65532\t65532\n", "Gid:\t65532\t65532\t65532\t65532\n", "CapPrm:\t0000000000000000\n",
			"CapEff:\t0000000000000000\n", "NoNewPrivs:\t1\n", "Seccomp:\t2\n",
		} {
			require.Contains(t, string(text), want)
		}
	}
	root, err := os.ReadDir(fmt.Sprintf("/proc/%d/root", r.process.Pid))
	require.NoError(t, err)
	require.Len(t, root, 1)
	require.Equal(t, "proc", root[0].Name())
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mounts", r.process.Pid))
	require.NoError(t, err)
	require.Len(t, strings.Split(strings.TrimSpace(string(mounts)), "\n"), 2, "%s", mounts)
}

// TestLoadRefuses checks that Load refuses invalid code and mismatched descriptors, and names the fault.
func TestLoadRefuses(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	greeter := codeFile(t, examples+"greeter-c/greeter-c.wasm")
	faults := descriptors(t, examples+"faults-c/faults.proto")
	changed := filepath.Join(t.TempDir(), "changed.proto")
	text, err := os.ReadFile(greeterProto)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(changed, []byte(strings.Replace(string(text), "string name = 1", "uint32 name = 1", 1)), 0o644))
	damaged, err := os.ReadFile(greeter.Name())
	require.NoError(t, err)
	damaged[len(damaged)/2] ^= 1
	damagedFile := filepath.Join(t.TempDir(), "damaged")
	require.NoError(t, os.WriteFile(damagedFile, damaged, 0o600))
	open := func(path string) *os.File {
		f, err := os.Open(path)
		require.NoError(t, err)
		t.Cleanup(func() { f.Close() })
		return f
	}
	for name, c := range map[string]struct {
		code  workerapi.Code
		class func(error) bool
		says  string
	}{
		"no descriptors": {workerapi.Code{Image: workerapi.File{File: greeter}}, errdefs.IsInvalidArgument, "descriptors"},
		"junk descriptors": {workerapi.Code{Image: workerapi.File{File: greeter}, Descriptors: []byte("junk")}, errdefs.IsInvalidArgument,
			"descriptors"},
		"of another service": {workerapi.Code{Image: workerapi.File{File: greeter}, Descriptors: faults}, errdefs.IsInvalidArgument, "greeter"},
		"service is unknown": {workerapi.Code{Image: workerapi.File{File: greeter}, Descriptors: faults, Services: []string{"a.B"}},
			errdefs.IsInvalidArgument, "a.B"},
		"types differ": {workerapi.Code{Image: workerapi.File{File: greeter}, Descriptors: descriptors(t, changed)},
			errdefs.IsInvalidArgument, "name"},
		"damaged code": {workerapi.Code{Image: workerapi.File{File: open(damagedFile)}, Descriptors: faults}, errdefs.IsFailedPrecondition,
			""},
		"not code": {workerapi.Code{Image: workerapi.File{File: open(changed)}, Descriptors: faults}, errdefs.IsFailedPrecondition,
			""},
		"no code":             {workerapi.Code{Descriptors: faults}, errdefs.IsInvalidArgument, "code"},
		"a directory as code": {workerapi.Code{Image: workerapi.File{File: open(t.TempDir())}}, errdefs.IsInvalidArgument, "regular"},
	} {
		t.Run(name, func(t *testing.T) {
			c.code.Digest = name
			_, err := r.Load(t.Context(), c.code)
			require.Error(t, err)
			require.True(t, c.class(err), "%v", err)
			require.ErrorContains(t, err, c.says)
			_, err = r.Start(t.Context(), workerapi.PodSpec{ID: "x", Digest: name})
			require.True(t, errdefs.IsNotFound(err), "%v", err)
		})
	}
}

func TestStartRefuses(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	digest := r.load("greeter-c")
	file := func() workerapi.File {
		f, err := os.Open(os.DevNull)
		require.NoError(t, err)
		t.Cleanup(func() { f.Close() })
		return workerapi.File{File: f}
	}
	udp, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	defer udp.Close()
	for name, spec := range map[string]workerapi.PodSpec{
		"no ID":             {Digest: digest},
		"negative memory":   {ID: "x", Digest: digest, Resources: workerapi.Resources{MemoryBytes: -1}},
		"negative limit":    {ID: "x", Digest: digest, Limits: workerapi.Limits{Concurrency: -1}},
		"not a socket":      {ID: "x", Digest: digest, Ports: []workerapi.Port{{Kind: workerapi.PortCleartext, Socket: file()}}},
		"port without":      {ID: "x", Digest: digest, Ports: []workerapi.Port{{Kind: workerapi.PortCleartext}}},
		"unknown port":      {ID: "x", Digest: digest, Ports: []workerapi.Port{{Kind: "carrier pigeon", Socket: file()}}},
		"TLS missing":       {ID: "x", Digest: digest, Ports: []workerapi.Port{{Kind: workerapi.PortQUIC, Socket: fileOf(t, udp)}}},
		"bad certificate":   {ID: "x", Digest: digest, TLS: &workerapi.TLS{Certificate: []byte("x"), Key: []byte("y")}},
		"mount without dir": {ID: "x", Digest: digest, Mounts: []workerapi.Mount{{Guest: "/data"}}},
		"mount not there":   {ID: "x", Digest: digest, Mounts: []workerapi.Mount{{Guest: "data", Dir: file()}}},
		"stdin of a server": {ID: "x", Digest: digest, Stdin: true},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := r.Start(t.Context(), spec)
			require.Error(t, err)
			require.False(t, strings.Contains(err.Error(), "unavailable"), "%v", err)
			require.Empty(t, list(t, r, "x").ID)
		})
	}
	_, err = r.Start(t.Context(), workerapi.PodSpec{ID: "x", Digest: digest, Resources: workerapi.Resources{MemoryBytes: 1000}})
	require.True(t, errdefs.IsResourceExhausted(err), "%v", err)
}

// TestNothingIsLeft checks that the worker's descriptors and threads do not grow when pods are started and removed.
func TestNothingIsLeft(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	files := func() int {
		entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", r.process.Pid))
		require.NoError(t, err)
		return len(entries)
	}
	round := func() {
		p := r.serve("greeter-c")
		p.greeter().must("SayHello", `{"name":"Ada"}`)
		post(t, p.overHTTP3(), "https://"+p.tls.String()+"/greet.v1.Greeter/SayHello", `{"name":"Ada"}`)
		require.NoError(t, r.Remove(t.Context(), p.ID))
		c := r.command(nil, "out", "x")
		c.exit()
		require.NoError(t, r.Remove(t.Context(), c.ID))
	}
	round()
	before := files()
	for range 10 {
		round()
	}
	eventually(t, "all is closed", func() bool { return files() <= before })
	all, err := r.List(t.Context())
	require.NoError(t, err)
	require.Empty(t, all)
}
