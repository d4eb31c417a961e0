package program

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/tripod-run/tripod/internal/component/protowit/protosource"
	"github.com/tripod-run/tripod/internal/crilog"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/test/harness/testns"
	"github.com/tripod-run/tripod/test/races"
	"github.com/tripod-run/tripod/test/until"
)

const (
	// asProgram makes a copy of the test binary run the program.
	asProgram = "TRIPOD_TEST_AS_PROGRAM"
	// asDaemon makes it run daemonMain. The value is the path of a control socket.
	asDaemon = "TRIPOD_TEST_AS_DAEMON"
	// asServer makes it run serverMain.
	asServer = "TRIPOD_TEST_AS_SERVER"

	// openFiles lowers its limit of open files.
	openFiles = "TRIPOD_TEST_OPEN_FILES"

	examples = "../../../../examples/wasm/"
	nobody   = 65532
)

func TestMain(m *testing.M) {
	testns.Reenter()
	switch {
	case os.Getenv(asProgram) != "":
		if n, err := strconv.ParseUint(os.Getenv(openFiles), 10, 32); err == nil {
			if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: n, Max: n}); err != nil {
				panic(err)
			}
		}
		os.Exit(Main("dev", os.Args[1:]))
	case os.Getenv(asDaemon) != "":
		daemonMain()
	case os.Getenv(asServer) != "":
		serverMain()
	case !testns.Inside():
		os.Exit(testns.Run(os.Args, testns.Options{Strict: true}))
	}
	os.Exit(races.Run(m.Run))
}

// program returns a command that runs the program.
func program(t testing.TB, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	c := exec.Command(self, args...)
	c.Env = []string{asProgram + "=1", "RUST_BACKTRACE=0", "GORACE=atexit_sleep_ms=0"} // otherwise it takes another second to exit
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	return c
}

func asJSON(t testing.TB, v any) string {
	t.Helper()
	text, err := json.Marshal(v)
	require.NoError(t, err)
	return string(text)
}

// rig is a worker, started like the daemon does it, and the daemon's connection to the worker.
type rig struct {
	*workerapi.Client
	t       testing.TB
	dir     string
	process *os.Process
	exited  chan struct{}
	state   *os.ProcessState
	log     *os.File
}

func (r *rig) controlPath() string { return filepath.Join(r.dir, "control.sock") }
func (r *rig) dataPath() string    { return filepath.Join(r.dir, "data.sock") }

func startWorker(t testing.TB, config workerapi.WorkerConfig, env ...string) *rig {
	t.Helper()
	config.Name, config.UID, config.GID, config.Isolated = "test", nobody, nobody, true
	r := &rig{t: t, dir: t.TempDir(), exited: make(chan struct{})}
	var err error
	r.log, err = os.Create(filepath.Join(r.dir, "worker.log"))
	require.NoError(t, err)
	readyRead, readyWrite, err := os.Pipe()
	require.NoError(t, err)
	c := program(t, "worker", asJSON(t, config))
	c.ExtraFiles = []*os.File{listenUnix(t, r.controlPath()), listenUnix(t, r.dataPath()), readyWrite}
	c.Stderr, c.Env = r.log, append(c.Env, env...)
	c.SysProcAttr.Cloneflags = workerapi.Namespaces
	c.SysProcAttr.Setsid = true
	require.NoError(t, c.Start())
	for _, f := range c.ExtraFiles {
		f.Close()
	}
	r.process = c.Process
	go func() {
		_ = c.Wait()
		r.state = c.ProcessState
		close(r.exited)
	}()
	t.Cleanup(r.end)
	line, err := bufio.NewReader(readyRead).ReadString('\n')
	readyRead.Close()
	require.NoError(t, err, "the worker is not ready: %s", r.logText())
	require.Equal(t, "ready\n", line)
	r.Client = r.connect()
	return r
}

func (r *rig) end() {
	_ = r.process.Kill()
	<-r.exited
	if strings.Contains(r.logText(), "DATA RACE") { // a report of the race detector
		r.t.Error("the worker has a data race")
	}
	if r.t.Failed() {
		r.t.Logf("the worker's log:\n%.8192s", r.logText())
	}
	r.log.Close()
}

func (r *rig) logText() string {
	text, _ := os.ReadFile(r.log.Name())
	return string(text)
}

// connect connects to the worker like a new daemon.
func (r *rig) connect() *workerapi.Client {
	r.t.Helper()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: r.controlPath()})
	require.NoError(r.t, err)
	c, err := workerapi.NewClient(r.t.Context(), conn)
	require.NoError(r.t, err)
	r.t.Cleanup(func() { c.Close() })
	return c
}

func listenUnix(t testing.TB, path string) *os.File {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	require.NoError(t, err)
	l.SetUnlinkOnClose(false)
	defer l.Close()
	f, err := l.File()
	require.NoError(t, err)
	return f
}

// compiled caches the compiled guests of this test run.
var compiled sync.Map

// codeFile returns a file with the compiled code of a guest.
func codeFile(t testing.TB, wasm string) *os.File {
	t.Helper()
	compile := sync.OnceValues(func() ([]byte, error) {
		c := program(t, "compile", "{}")
		in, err := os.Open(wasm)
		if err != nil {
			return nil, err
		}
		defer in.Close()
		var stderr bytes.Buffer
		c.Stdin, c.Stderr = in, &stderr
		code, err := c.Output()
		if err != nil {
			return nil, fmt.Errorf("%w: %s", err, stderr.String())
		}
		return code, nil
	})
	once, _ := compiled.LoadOrStore(wasm, compile)
	code, err := once.(func() ([]byte, error))()
	require.NoError(t, err)
	f, err := os.CreateTemp(t.TempDir(), "code")
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	_, err = f.Write(code)
	require.NoError(t, err)
	return f
}

// descriptors returns the descriptors of a .proto file.
func descriptors(t testing.TB, file string) []byte {
	t.Helper()
	result, err := protosource.Compile(t.Context(), []string{file}, nil)
	require.NoError(t, err)
	set, err := proto.Marshal(result.Set)
	require.NoError(t, err)
	return set
}

// load loads an example and returns its digest.
func (r *rig) load(name string) string {
	r.t.Helper()
	dir := examples + name + "/" + name
	switch name {
	case "wide-js":
		dir = "testdata/wide-js/wide"
	case "snapshot":
		dir = "../internal/worker/testdata/snapshot"
	}
	code := workerapi.Code{Digest: "sha256:" + name, Image: workerapi.File{File: codeFile(r.t, dir+".wasm")}}
	switch name {
	case "wide-js":
		code.Descriptors = descriptors(r.t, dir+".proto")
	case "faults-c":
		code.Descriptors = descriptors(r.t, examples+"faults-c/faults.proto")
	case "snapshot":
		code.Descriptors = descriptors(r.t, examples+"raw-c/sum.proto")
	case "greeter-c", "greeter-js":
		code.Descriptors = descriptors(r.t, examples+"greeter/greeter.proto")
	}
	_, err := r.Load(r.t.Context(), code)
	require.NoError(r.t, err)
	return code.Digest
}

// pod is a started pod, with the addresses of its sockets.
type pod struct {
	workerapi.Status
	rig       *rig
	log       string
	tls       netip.AddrPort // for TCP and UDP
	cleartext netip.AddrPort
	material  dataplane.Material
}

// serve starts a server on loopback: TLS, QUIC and cleartext.
func (r *rig) serve(example string, change ...func(*workerapi.PodSpec)) *pod {
	r.t.Helper()
	p := &pod{rig: r, log: filepath.Join(r.t.TempDir(), "0.log")}
	tcp, udp := listenPair(r.t)
	clear, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(r.t, err)
	defer clear.Close()
	p.tls = tcp.Addr().(*net.TCPAddr).AddrPort()
	p.cleartext = clear.Addr().(*net.TCPAddr).AddrPort()
	p.material, err = dataplane.SelfSigned([]string{"localhost"}, []netip.Addr{p.tls.Addr()})
	require.NoError(r.t, err)
	spec := workerapi.PodSpec{
		ID: fmt.Sprint("pod-", time.Now().UnixNano()), Component: "example.com:" + example + "@1.0.0", Digest: r.load(example),
		Args: []string{example}, Env: []string{"POD_NAME=the pod"}, Log: workerapi.File{File: openLog(r.t, p.log)},
		Ports: []workerapi.Port{
			{Kind: workerapi.PortTLS, Socket: fileOf(r.t, tcp.(*net.TCPListener))},
			{Kind: workerapi.PortQUIC, Socket: fileOf(r.t, udp)},
			{Kind: workerapi.PortCleartext, Socket: fileOf(r.t, clear.(*net.TCPListener))},
		},
		TLS: &workerapi.TLS{Certificate: p.material.Certificate, Key: p.material.Key},
	}
	tcp.Close()
	udp.Close()
	for _, c := range change {
		c(&spec)
	}
	p.Status, err = r.Start(r.t.Context(), spec)
	spec.CloseFiles()
	require.NoError(r.t, err)
	require.Equal(r.t, workerapi.StateRunning, p.State)
	return p
}

// command starts a command.
func (r *rig) command(change func(*workerapi.PodSpec), args ...string) *pod {
	r.t.Helper()
	p, err := r.tryCommand(change, args...)
	require.NoError(r.t, err)
	return p
}

func (r *rig) tryCommand(change func(*workerapi.PodSpec), args ...string) (*pod, error) {
	r.t.Helper()
	p := &pod{rig: r, log: filepath.Join(r.t.TempDir(), "0.log")}
	spec := workerapi.PodSpec{
		ID: fmt.Sprint("command-", time.Now().UnixNano()), Component: "example.com:command@1.0.0", Digest: r.load("command-go"),
		Args: append([]string{"command-go"}, args...), Log: workerapi.File{File: openLog(r.t, p.log)},
	}
	if change != nil {
		change(&spec)
	}
	var err error
	p.Status, err = r.Start(r.t.Context(), spec)
	spec.CloseFiles()
	return p, err
}

// listenPair returns a TCP and a UDP socket with the same port.
func listenPair(t testing.TB) (net.Listener, *net.UDPConn) {
	t.Helper()
	for range 100 {
		tcp, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		udp, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(tcp.Addr().(*net.TCPAddr).AddrPort()))
		if err == nil {
			return tcp, udp
		}
		tcp.Close()
	}
	t.Fatal("found no port that is free for both TCP and UDP")
	return nil, nil
}

func fileOf(t testing.TB, socket interface{ File() (*os.File, error) }) workerapi.File {
	t.Helper()
	f, err := socket.File()
	require.NoError(t, err)
	return workerapi.File{File: f}
}

func openLog(t testing.TB, path string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o640)
	require.NoError(t, err)
	return f
}

// exited waits for the event that the pod has exited.
func (p *pod) exit() workerapi.Status {
	p.rig.t.Helper()
	for {
		select {
		case e, ok := <-p.rig.Events():
			require.True(p.rig.t, ok, "the connection to the worker has ended")
			if e.Exited != nil && e.Exited.ID == p.ID {
				return *e.Exited
			}
		case <-time.After(30 * time.Second):
			p.rig.t.Fatalf("pod %s has not exited", p.ID)
		}
	}
}

// logged returns the text of one stream in the log, without the log format.
func (p *pod) logged(stream string) string {
	p.rig.t.Helper()
	content, err := os.ReadFile(p.log)
	require.NoError(p.rig.t, err)
	var text strings.Builder
	for line := range bytes.Lines(content) {
		l, err := crilog.Parse(line)
		require.NoError(p.rig.t, err)
		if l.Stream == stream {
			text.Write(l.Content)
			if !l.Partial {
				text.WriteByte('\n')
			}
		}
	}
	return text.String()
}

// stats returns the pod's current statistics.
func (p *pod) stats() workerapi.Stats {
	p.rig.t.Helper()
	s, err := p.rig.Stats(p.rig.t.Context(), p.ID)
	require.NoError(p.rig.t, err)
	require.Len(p.rig.t, s, 1)
	return s[0]
}

// eventually polls until a condition holds.
var eventually = until.Holds

func withTimeout(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}
