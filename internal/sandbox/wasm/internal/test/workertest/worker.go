package workertest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wit"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/egress"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

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
	h := &fakeHandler{config: config, engine: engineOf(), code: map[string][]string{}, quick: map[string]bool{}, pods: map[string]*fakePod{},
		started: time.Now(), refused: make(chan struct{}, 1)}
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
	return workerapi.Loaded{Digest: code.Digest, Quick: h.quick[code.Digest], World: wit.World(value(words, "world", string(wit.WorldGRPC))),
		OwnWorkerReason: value(words, "apart", ""),
		Imports:         []string{value(words, "import", "")}}, nil
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
	p.status = workerapi.Status{ID: spec.ID, Component: spec.Component, Digest: spec.Digest, State: workerapi.StateRunning,
		StartedAt: time.Now()}
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
	p.status.State, p.status.FinishedAt, p.status.ExitCode, p.status.Reason = workerapi.StateExited, time.Now(), int32(code),
		sandbox.ReasonCompleted
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
		list = append(list, workerapi.Metrics{ID: id, Component: p.spec.Component,
			Methods: []workerapi.MethodMetrics{{Procedure: string(p.tls.Certificate)}}})
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
