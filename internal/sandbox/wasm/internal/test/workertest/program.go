// Package workertest makes a test binary a tripod-wasm without an engine, whose components are lists of words that control the
// guest. The protocol, the processes and the files are real. Begin with Main.
//
//	world=command code=7 after=10ms   exits by itself
//	world=grpc                        serves, and greets clients on its cleartext port
//	deaf                              does not exit before the grace period expires
//	invalid, limit, crash, slow       makes the compiler fail or hang
//	pause=500ms                       makes the compiler slower
//	optimise=PATH                     makes the compiler of optimised code wait until there is such a file
//	slowly                            makes the compiler of quick code refuse it
//	mismatch                          does not match its descriptors
//	apart=why                         must not share a worker
//	import=name connect=address       imports an interface, and connects to an address when its log is reopened
package workertest

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/component/wit"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dialer"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/egress"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/launch"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/test/harness/testns"
	"github.com/tripod-run/tripod/test/races"
	"github.com/tripod-run/tripod/test/until"
)

// Program is the path of a copy of the test binary that all users can execute.
var Program string

// Main runs the tests of a package, or the process that a command line of tripod-wasm asks for. It does not return.
func Main(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "fingerprint":
			fmt.Println(engineOf())
			os.Exit(0)
		case "compile":
			os.Exit(fakeCompile())
		case "worker":
			os.Exit(fakeWorker(os.Args[2]))
		case "dialer":
			os.Exit(realDialer(os.Args[2]))
		}
	}
	os.Exit(races.Run(func() int { return testMain(m) }))
}

func testMain(m *testing.M) int {
	unix.Umask(0o022)
	dir, err := os.MkdirTemp("", "wasm-test-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	Program = filepath.Join(dir, launch.Name)
	if err := Install(Program, "1"); err != nil {
		panic(err)
	}
	defer removeTestCgroup()
	return m.Run()
}

// Cgroup is the parent of the workers' cgroups. It lies in the cgroup of the tests' namespaces (hack/testns.sh),
// because another namespace can have a process with the same ID.
var Cgroup = fmt.Sprintf("%s/tripod-wasm-test-%d", testns.Cgroup(), os.Getpid())

func removeTestCgroup() {
	tree, err := cgroup.Open(cgroup.DriverCgroupfs, Cgroup)
	if err != nil {
		return
	}
	for _, dir := range tree.Dirs(Cgroup) {
		if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			fmt.Fprintln(os.Stderr, "clean up:", err)
		}
	}
}

// Install copies the test binary to path. The file path.engine determines its engine's fingerprint.
func Install(path, engine string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	raw, err := os.ReadFile(self)
	if err != nil {
		return err
	}
	if err := os.Chmod(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path+".engine", []byte(engine), 0o644); err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", raw, 0o755); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func engineOf() string {
	self, _ := os.Executable()
	raw, _ := os.ReadFile(self + ".engine")
	return "fake engine " + string(raw)
}

const (
	CodeMagic    = "code of "
	wordsSection = "words"
)

// Module returns a core module with the words in a custom section.
func Module(words string) []byte {
	section := append([]byte{byte(len(wordsSection))}, wordsSection+words...)
	m := append([]byte("\x00asm\x01\x00\x00\x00"), 0)
	m = binary.AppendUvarint(m, uint64(len(section)))
	return append(m, section...)
}

func fakeCompile() int {
	if os.Getuid() == 0 {
		fmt.Fprintln(os.Stderr, "the compiler runs as root")
		return workerapi.CompileInternal
	}
	in, err := io.ReadAll(os.Stdin)
	if err != nil {
		return workerapi.CompileInternal
	}
	var config workerapi.CompileConfig
	if err := json.Unmarshal([]byte(os.Args[2]), &config); err != nil {
		return workerapi.CompileInternal
	}
	_, in, _ = bytes.Cut(in, []byte(wordsSection))
	if name := value(strings.Fields(string(in)), "optimise", ""); name != "" && !config.Quick {
		if err := until.Poll(time.Minute, func() error { _, err := os.Stat(name); return err }); err != nil {
			return workerapi.CompileInternal
		}
	}
	if config.Quick && slices.Contains(strings.Fields(string(in)), "slowly") {
		fmt.Fprintln(os.Stderr, "unsupported instruction")
		return workerapi.CompileInvalid
	}
	switch word := strings.Fields(string(in) + " -")[0]; word {
	case "invalid":
		fmt.Fprintln(os.Stderr, `unknown import "example:none/thing"`)
		return workerapi.CompileInvalid
	case "limit":
		fmt.Fprintln(os.Stderr, "more than 2 GiB")
		return workerapi.CompileLimit
	case "crash":
		_ = unix.Kill(os.Getpid(), unix.SIGSEGV)
		select {}
	case "slow":
		time.Sleep(time.Hour)
	case "pause=500ms":
		time.Sleep(500 * time.Millisecond) // pacing: a compilation takes a while
	}
	fmt.Printf("%s%s\n%s", CodeMagic, engineOf(), in)
	return workerapi.CompileOK
}

// realDialer runs the dialer, but without the lockdown, which is in another package.
func realDialer(argument string) int {
	var config workerapi.DialerConfig
	if err := json.Unmarshal([]byte(argument), &config); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	l, err := net.FileListener(os.NewFile(workerapi.FDControl, "control"))
	if err != nil || os.Getuid() == 0 {
		fmt.Fprintln(os.Stderr, "the dialer runs as root, or has no socket:", err)
		return 2
	}
	server := dialer.New(l.(*net.UnixListener), config.Idle, slog.New(slog.NewJSONHandler(os.Stderr, nil)))
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, unix.SIGTERM)
	go func() { <-stop; server.Drain() }()
	ready := os.NewFile(workerapi.FDDialerReady, "ready")
	fmt.Fprintln(ready, "ready")
	ready.Close()
	if err := server.Serve(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// fakeWorker runs the worker process.
func fakeWorker(argument string) int {
	var config workerapi.WorkerConfig
	if err := json.Unmarshal([]byte(argument), &config); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	l, err := net.FileListener(os.NewFile(workerapi.FDControl, "control"))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	h := &fakeHandler{config: config, engine: engineOf(), code: map[string][]string{}, quick: map[string]bool{}, pods: map[string]*fakePod{}, started: time.Now(), refused: make(chan struct{}, 1)}
	h.server = workerapi.NewServer(l.(*net.UnixListener), h, slog.New(slog.NewJSONHandler(os.Stderr, nil)))
	ready := os.NewFile(workerapi.FDReady, "ready")
	fmt.Fprintln(ready, "ready")
	ready.Close()
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, unix.SIGTERM)
	go func() {
		<-stop
		os.Exit(0)
	}()
	if err := h.server.Serve(); err != nil {
		return 1
	}
	return 0
}

type fakeHandler struct {
	config  workerapi.WorkerConfig
	engine  string
	server  *workerapi.Server
	started time.Time

	// refused gets a value when UpdateDialer names an unknown pod. A start of the component "slowstart" waits for that.
	refused chan struct{}

	mu   sync.Mutex
	code map[string][]string
	// quick says whether the code is quick.
	quick map[string]bool
	pods  map[string]*fakePod
}

type fakePod struct {
	spec   workerapi.PodSpec
	words  []string
	status workerapi.Status
	tls    workerapi.TLS
	update *workerapi.Resources
	ended  chan struct{}
}

func (h *fakeHandler) Hello() workerapi.Hello {
	self, _ := os.Readlink("/proc/self") // the PID in the daemon's namespace
	pid, _ := strconv.Atoi(self)
	return workerapi.Hello{Version: workerapi.Version, Program: "fake", Engine: h.engine, Name: h.config.Name, Pid: pid, StartedAt: h.started}
}

func (h *fakeHandler) Daemon(bool) {}

func (h *fakeHandler) Load(_ context.Context, code workerapi.Code) (workerapi.Loaded, error) {
	defer code.Image.Close()
	raw, err := io.ReadAll(code.Image)
	if err != nil {
		return workerapi.Loaded{}, err
	}
	head, body, _ := strings.Cut(string(raw), "\n")
	if head != CodeMagic+h.engine {
		return workerapi.Loaded{}, fmt.Errorf("code is of %q: %w", head, errdefs.ErrFailedPrecondition)
	}
	words := strings.Fields(body)
	if has(words, "mismatch") {
		return workerapi.Loaded{}, fmt.Errorf("function greet: result: string, not u32: %w", errdefs.ErrInvalidArgument)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if old, known := h.quick[code.Digest]; !known || old {
		h.quick[code.Digest] = code.Quick
	}
	h.code[code.Digest] = words
	return workerapi.Loaded{Digest: code.Digest, Quick: h.quick[code.Digest], World: wit.World(value(words, "world", string(wit.WorldGRPC))), OwnWorkerReason: value(words, "apart", ""),
		Imports: []string{value(words, "import", "")}}, nil
}

func (h *fakeHandler) Unload(_ context.Context, digest string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.code, digest)
	return nil
}

func (h *fakeHandler) Start(_ context.Context, spec workerapi.PodSpec) (workerapi.Status, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	words, ok := h.code[spec.Digest]
	if !ok {
		spec.CloseFiles()
		return workerapi.Status{}, fmt.Errorf("code %s: %w", spec.Digest, errdefs.ErrNotFound)
	}
	if p := h.pods[spec.ID]; p != nil && p.status.State == workerapi.StateRunning {
		spec.CloseFiles()
		return workerapi.Status{}, fmt.Errorf("pod %s: %w", spec.ID, errdefs.ErrAlreadyExists)
	}
	if has(words, "slowstart") {
		h.mu.Unlock()
		select {
		case <-h.refused:
		case <-time.After(10 * time.Second):
		}
		h.mu.Lock()
	}
	p := &fakePod{spec: spec, words: words, ended: make(chan struct{})}
	p.status = workerapi.Status{ID: spec.ID, Component: spec.Component, Digest: spec.Digest, State: workerapi.StateRunning, StartedAt: time.Now()}
	if spec.TLS != nil {
		p.tls = *spec.TLS
	}
	for _, port := range spec.Ports {
		if port.Kind == workerapi.PortCleartext {
			l, err := net.FileListener(port.Socket.File) // a copy, because end closes the pod's files
			if err != nil {
				spec.CloseFiles()
				return workerapi.Status{}, err
			}
			go greet(l, p.ended, value(words, "greeting", "hello"))
		}
	}
	h.pods[spec.ID] = p
	if spec.Log.File != nil {
		fmt.Fprintf(spec.Log.File, "%s stdout F started %s\n", time.Now().Format(time.RFC3339Nano), strings.Join(spec.Args, " "))
	}
	if after := value(words, "after", ""); after != "" {
		d, _ := time.ParseDuration(after)
		code, _ := strconv.Atoi(value(words, "code", "0"))
		time.AfterFunc(d, func() { h.end(spec.ID, p, code) })
	}
	return p.status, nil
}

// greet sends a greeting to each client of a pod's port.
func greet(l net.Listener, ended chan struct{}, greeting string) {
	go func() { <-ended; l.Close() }()
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		fmt.Fprintln(conn, greeting)
		conn.Close()
	}
}

func (h *fakeHandler) end(id string, p *fakePod, code int) workerapi.Status {
	h.mu.Lock()
	defer h.mu.Unlock()
	if p.status.State == workerapi.StateExited {
		return p.status
	}
	p.status.State, p.status.FinishedAt, p.status.ExitCode, p.status.Reason = workerapi.StateExited, time.Now(), int32(code), sandbox.ReasonCompleted
	if code != 0 {
		p.status.Reason = sandbox.ReasonError
	}
	p.spec.CloseFiles()
	close(p.ended)
	s := p.status
	h.server.Publish(workerapi.Event{Exited: &s})
	return s
}

func (h *fakeHandler) pod(id string) (*fakePod, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if p := h.pods[id]; p != nil {
		return p, nil
	}
	return nil, fmt.Errorf("pod %s: %w", id, errdefs.ErrNotFound)
}

func (h *fakeHandler) Stop(_ context.Context, id string, grace time.Duration) (workerapi.Status, error) {
	p, err := h.pod(id)
	if err != nil {
		return workerapi.Status{}, err
	}
	if !has(p.words, "deaf") {
		return h.end(id, p, 0), nil
	}
	select {
	case <-p.ended:
	case <-time.After(grace):
	}
	return h.end(id, p, sandbox.ExitKilled), nil
}

func (h *fakeHandler) Kill(ctx context.Context, id string) error {
	if p, err := h.pod(id); err == nil {
		h.end(id, p, sandbox.ExitKilled)
	}
	return nil
}

func (h *fakeHandler) Remove(ctx context.Context, id string) error {
	_ = h.Kill(ctx, id)
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.pods, id)
	return nil
}

func (h *fakeHandler) List(context.Context) ([]workerapi.Status, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	list := []workerapi.Status{}
	for _, p := range h.pods {
		s := p.status
		s.Quick = h.quick[s.Digest]
		list = append(list, s)
	}
	return list, nil
}

func (h *fakeHandler) Stats(context.Context, []string) ([]workerapi.Stats, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var list []workerapi.Stats
	for id, p := range h.pods {
		if p.status.State == workerapi.StateRunning {
			list = append(list, workerapi.Stats{ID: id, Time: time.Now(), CPUNanos: 5, MemoryBytes: 1 << 20, Requests: uint64(len(p.spec.Env))})
		}
	}
	return list, nil
}

func (h *fakeHandler) Profile(context.Context, string, int) (workerapi.Profile, error) {
	return workerapi.Profile{}, nil
}

func (h *fakeHandler) Metrics(context.Context, []string) ([]workerapi.Metrics, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var list []workerapi.Metrics
	for id, p := range h.pods {
		list = append(list, workerapi.Metrics{ID: id, Component: p.spec.Component, Methods: []workerapi.MethodMetrics{{Procedure: string(p.tls.Certificate)}}})
	}
	return list, nil
}

func (h *fakeHandler) Attach(_ context.Context, id string, session *workerapi.AttachSession) error {
	p, err := h.pod(id)
	if err != nil {
		return err
	}
	go func() {
		defer session.Close()
		_ = session.Write(false, []byte("attached\n"))
		<-p.ended
	}()
	return nil
}

// Channels writes the names of the channels to the connection, and closes it when the pod exits.
func (h *fakeHandler) Channels(_ context.Context, id string, conn net.Conn) error {
	p, err := h.pod(id)
	if err != nil {
		return err
	}
	if len(p.spec.Channels) == 0 {
		return fmt.Errorf("pod %s has no channels: %w", id, errdefs.ErrFailedPrecondition)
	}
	go func() {
		defer conn.Close()
		for _, c := range p.spec.Channels {
			fmt.Fprintf(conn, "%s %s %d\n", c.Name, c.Topic, c.Flags)
		}
		<-p.ended
	}()
	return nil
}

func (h *fakeHandler) ReopenLog(_ context.Context, id string, file *os.File) error {
	defer file.Close()
	if _, err := h.pod(id); err != nil {
		return err
	}
	if _, err := fmt.Fprintf(file, "%s stdout F reopened\n", time.Now().Format(time.RFC3339Nano)); err != nil {
		return err
	}
	return h.callOut(id, file)
}

// callOut connects to the address of the word connect=, if the pod may call out, and writes the result to the log.
func (h *fakeHandler) callOut(id string, log *os.File) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.pods[id]
	to, err := netip.ParseAddrPort(value(p.words, "connect", ""))
	if p.spec.Egress == nil || err != nil {
		return nil
	}
	conn, err := net.FileConn(p.spec.Egress.Dialer.File)
	if err != nil {
		return err
	}
	client := egress.NewClient(conn.(*net.UnixConn)) // of a copy of the socket
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	out, err := client.Connect(ctx, "tcp", to.Addr().String(), to.Port())
	if err == nil {
		out.Close()
	}
	_, err = fmt.Fprintf(log, "%s stdout F connect: %v\n", time.Now().Format(time.RFC3339Nano), err)
	return err
}

func (h *fakeHandler) UpdateTLS(_ context.Context, id string, t workerapi.TLS) error {
	p, err := h.pod(id)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	p.tls = t
	return nil
}

func (h *fakeHandler) UpdateDialer(_ context.Context, id string, dialer *os.File) error {
	p, err := h.pod(id)
	if err != nil {
		dialer.Close()
		select {
		case h.refused <- struct{}{}:
		default:
		}
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	p.spec.Egress.Dialer.Close()
	p.spec.Egress.Dialer.File = dialer
	return nil
}

func (h *fakeHandler) Update(_ context.Context, u workerapi.Update) error {
	p, err := h.pod(u.ID)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	p.update = u.Resources
	return nil
}

func has(words []string, word string) bool {
	for _, w := range words {
		if w == word {
			return true
		}
	}
	return false
}

func value(words []string, key, fallback string) string {
	for _, w := range words {
		if v, ok := strings.CutPrefix(w, key+"="); ok {
			return v
		}
	}
	return fallback
}

// CompilerPids finds the compilers that tests have started.
func CompilerPids(program string) []string { return Pids(program, "compile") }

// Pids finds the processes of the program in a mode that tests have started.
func Pids(program, mode string) (pids []string) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range files {
		cmdline, _ := os.ReadFile(file)
		parent, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "status"))
		if strings.HasPrefix(string(cmdline), filepath.Base(program)+"\x00"+mode) && strings.Contains(string(parent), "\nPPid:\t"+strconv.Itoa(os.Getpid())+"\n") {
			pids = append(pids, filepath.Base(filepath.Dir(file)))
		}
	}
	return pids
}

// NicenessOf returns the nice values of all compilers' threads and, if the kernel groups by session, of their sessions.
func NicenessOf(program string) (values []int) {
	for _, pid := range CompilerPids(program) {
		if group, err := os.ReadFile("/proc/" + pid + "/autogroup"); err == nil && len(group) > 0 {
			_, text, _ := strings.Cut(strings.TrimSpace(string(group)), " nice ")
			value, _ := strconv.Atoi(text)
			values = append(values, value)
		}
		threads, _ := filepath.Glob("/proc/" + pid + "/task/[0-9]*")
		for _, thread := range threads {
			tid, _ := strconv.Atoi(filepath.Base(thread))
			if raw, err := unix.Getpriority(unix.PRIO_PROCESS, tid); err == nil {
				values = append(values, 20-raw)
			}
		}
	}
	slices.Sort(values)
	return slices.Compact(values)
}

// WorkerPids finds the workers and dialers by their command line.
func WorkerPids(program string) (pids []string) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		cmdline, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		stat, _ := os.ReadFile(filepath.Join(dir, "stat"))
		if (strings.HasPrefix(string(cmdline), program+"\x00worker") || strings.HasPrefix(string(cmdline), program+"\x00dialer")) && !strings.Contains(string(stat), ") Z ") {
			pids = append(pids, filepath.Base(dir))
		}
	}
	return pids
}
