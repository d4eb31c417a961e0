package wasm

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/crilog"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/internal/unixsocket"
)

// Limits of a standalone component, in bytes: of the memories of its guests together, and of their log.
const (
	standaloneMemory = 1 << 30
	standaloneLog    = 8 << 20
)

// Guest is a gRPC component for Standalone.
type Guest struct {
	Name string
	Wasm []byte
	// Descriptors is a serialized google.protobuf.FileDescriptorSet, and Services are those of its services that the
	// component serves.
	Descriptors []byte
	Services    []string
	Env         []string // KEY=value
}

// Standalone is a component in a worker of its own, without a node. It answers on loopback, over HTTP/2 in clear text.
// It has no files and cannot open connections.
type Standalone struct {
	// Address is where the component answers.
	Address netip.AddrPort

	name   string
	log    *os.File           // in memory, so that nothing of it remains if this process is killed
	stop   context.CancelFunc // kills the worker
	exited <-chan struct{}
	client *workerapi.Client
}

// StartStandalone compiles a component and starts it in a worker, within the limits of the configuration. The worker
// runs as the configuration's user, in namespaces of its own, if this process is root, and otherwise as the user of this
// process. It ends with this process, with ctx, or by Close.
//
// StartStandalone returns errdefs.ErrNotFound if there is no tripod-wasm, and errdefs.ErrInvalidArgument if the
// component is invalid.
func StartStandalone(ctx context.Context, c Config, g Guest) (_ *Standalone, err error) {
	c = c.withDefaults()
	if err := c.findProgram(); err != nil {
		return nil, err
	}
	quick := c.QuickCode && len(g.Wasm) > quickAbove
	code, err := compileStandalone(ctx, c, g.Wasm, quick)
	if quick && errdefs.IsInvalidArgument(err) { // as far as the quick compiler goes
		quick = false
		code, err = compileStandalone(ctx, c, g.Wasm, quick)
	}
	if err != nil {
		return nil, err
	}
	defer code.Close()
	s := &Standalone{name: g.Name}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	if err := s.launch(ctx, c); err != nil {
		return nil, err
	}
	load := workerapi.Code{Digest: digest.FromBytes(g.Wasm).String(), Image: workerapi.File{File: code}, Quick: quick, Descriptors: g.Descriptors, Services: g.Services}
	loaded, err := s.client.Load(ctx, load)
	if err != nil {
		return nil, err
	}
	return s, s.serve(ctx, c, g, loaded.Digest)
}

// CompileStandalone compiles a component as a node does, within the limits of the configuration, and returns the code with
// the fingerprint of the engine. The errors are those of StartStandalone.
func CompileStandalone(ctx context.Context, c Config, wasm []byte) (code []byte, engine string, err error) {
	c = c.withDefaults()
	if err := c.findProgram(); err != nil {
		return nil, "", err
	}
	if engine, err = askFingerprint(c); err != nil {
		return nil, "", err
	}
	compiled, err := compileStandalone(ctx, c, wasm, false)
	if err != nil {
		return nil, "", err
	}
	defer compiled.Close()
	code, err = io.ReadAll(compiled)
	return code, engine, err
}

// compileStandalone compiles a component into a memory file.
func compileStandalone(ctx context.Context, c Config, wasm []byte, quick bool) (*os.File, error) {
	component, err := memoryFile("component")
	if err != nil {
		return nil, err
	}
	defer component.Close()
	if _, err := component.Write(wasm); err != nil {
		return nil, err
	}
	if err := seal(component); err != nil {
		return nil, err
	}
	compiler := newCompiler(c)
	t := compiler.queue.enter(priorityPod)
	defer t.leave()
	return compiler.compile(ctx, component, quick, t)
}

// launch starts the worker and connects to it.
func (s *Standalone) launch(ctx context.Context, c Config) error {
	if os.Geteuid() != 0 {
		c.UID, c.GID = os.Geteuid(), os.Getegid()
	}
	config, err := json.Marshal(workerapi.WorkerConfig{
		Name: "standalone", UID: c.UID, GID: c.GID, MaxMemory: c.MaxMemory, Connections: c.Connections, LogSizeMax: standaloneLog, LogLevel: slog.LevelWarn.String(),
	})
	if err != nil {
		return err
	}
	control, data, conn, err := workerSockets(ctx)
	if err != nil {
		return err
	}
	defer func() {
		if s.client == nil {
			conn.Close()
		}
	}()
	ready, writer, err := os.Pipe()
	if err != nil {
		closeAll([]*os.File{control, data})
		return err
	}
	defer ready.Close()
	running, stop := context.WithCancel(ctx)
	s.stop = stop
	cmd, err := c.unprivileged(running, []*os.File{control, data, writer}, "worker", string(config))
	if err != nil {
		return err
	}
	log := &tail{limit: 4 << 10}
	cmd.Stderr, cmd.WaitDelay = log, time.Second
	cmd.SysProcAttr.Pdeathsig = unix.SIGKILL
	if err := s.start(cmd); err != nil {
		return fmt.Errorf("start %s: %w", c.Program, err)
	}
	if err := awaitReady(ctx, ready); err != nil {
		return fmt.Errorf("%w: %s", err, lastLine(log.bytes()))
	}
	s.client, err = workerapi.NewClient(ctx, conn)
	return err
}

// workerSockets returns the listening sockets of a worker, and a connection to the first one. It removes their names, so
// that nothing remains if this process is killed.
func workerSockets(ctx context.Context) (control, data *os.File, conn *net.UnixConn, err error) {
	dir, err := os.MkdirTemp("", "tripod-component-")
	if err != nil {
		return nil, nil, nil, err
	}
	defer os.RemoveAll(dir)
	if control, err = unixsocket.Listen(filepath.Join(dir, controlSocket)); err != nil {
		return nil, nil, nil, err
	}
	if data, err = unixsocket.Listen(filepath.Join(dir, dataSocket)); err == nil {
		conn, err = unixsocket.Dial(ctx, filepath.Join(dir, controlSocket)) // accepted by the worker
	}
	if err != nil {
		control.Close()
		if data != nil {
			data.Close()
		}
		return nil, nil, nil, err
	}
	return control, data, conn, nil
}

// start starts the worker and closes the files that it inherits. The kernel kills the worker when the thread that started
// it ends (Pdeathsig), so a goroutine stays locked to this thread until the worker has ended.
func (s *Standalone) start(cmd *exec.Cmd) error {
	started, exited := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(exited)
		runtime.LockOSThread()
		err := cmd.Start()
		closeAll(cmd.ExtraFiles)
		started <- err
		if err == nil {
			_ = cmd.Wait() // Close kills it
		}
	}()
	s.exited = exited
	return <-started
}

// serve starts the component's server.
func (s *Standalone) serve(ctx context.Context, c Config, g Guest, codeDigest string) error {
	listener, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return err
	}
	defer listener.Close()
	s.Address = listener.Addr().(*net.TCPAddr).AddrPort()
	socket, err := listener.File()
	if err != nil {
		return err
	}
	defer socket.Close()
	if s.log, err = memoryFile("log"); err != nil {
		return err
	}
	_, err = s.client.Start(ctx, workerapi.PodSpec{
		ID: g.Name, Component: g.Name, Digest: codeDigest, Args: []string{g.Name}, Env: g.Env, Log: workerapi.File{File: s.log},
		Resources: workerapi.Resources{MemoryBytes: standaloneMemory}, Holdings: c.Holdings,
		Ports: []workerapi.Port{{Kind: workerapi.PortCleartext, Socket: workerapi.File{File: socket}}},
	})
	return err
}

// Profile says where a component is during a call.
type Profile struct {
	// Typical is how long the call takes, from the worker to the guest and back: the median. It is 0 if there were too few
	// calls, because they take too long, or there is no second call of an instance.
	Typical time.Duration
	// Samples are random moments of the call: the functions in which the guest was, the innermost first, at most 20.
	Samples [][]string
}

// maxProfile bounds the time of Profile, and profileSamples is how many moments it looks at.
const (
	maxProfile     = 5 * time.Second
	profileSamples = 400
)

// Profile finds out where the component is during a call that is the nth of its instance, 1 or 2. It repeats the call, and ends
// most of them.
func (s *Standalone) Profile(ctx context.Context, nth int, call func(context.Context)) (Profile, error) {
	limits := workerapi.Limits{Reuse: nth > 1, ReuseRequests: nth}
	if err := s.client.Update(ctx, workerapi.Update{ID: s.name, Limits: &limits}); err != nil {
		return Profile{}, err
	}
	call(ctx) // it makes the snapshot
	if _, err := s.client.Profile(ctx, s.name, nth); err != nil {
		return Profile{}, err
	}
	within, cancel := context.WithTimeout(ctx, maxProfile)
	defer cancel()
	for range nth * profileSamples * 5 / 4 { // one in five ends before it is ended
		if within.Err() == nil {
			call(within)
		}
	}
	seen, err := s.client.Profile(ctx, s.name, 0)
	p := Profile{Typical: seen.Typical}
	for functions, n := range seen.Samples {
		for range n {
			p.Samples = append(p.Samples, strings.Split(functions, workerapi.Inside))
		}
	}
	return p, err
}

// Output returns what the guests have written to their standard streams, at most the last maxBytes.
func (s *Standalone) Output(maxBytes int) ([]byte, error) {
	log, err := io.ReadAll(io.NewSectionReader(s.log, 0, standaloneLog))
	if err != nil {
		return nil, err
	}
	output := &tail{limit: maxBytes}
	for text := range bytes.Lines(log) {
		line, err := crilog.Parse(text)
		if err != nil {
			break // the last line can be incomplete
		}
		content := line.Content
		if !line.Partial {
			content = append(content, '\n')
		}
		_, _ = output.Write(content) // cannot fail
	}
	return output.bytes(), nil
}

// Close ends the worker.
func (s *Standalone) Close() error {
	if s.client != nil {
		s.client.Close()
	}
	if s.stop != nil {
		s.stop()
	}
	if s.exited != nil {
		<-s.exited
	}
	if s.log != nil {
		s.log.Close()
	}
	return nil
}
