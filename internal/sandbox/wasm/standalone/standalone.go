// Package standalone runs a gRPC component in a worker of its own, without a node: for `tripod component test` and for code
// that is compiled before it is pushed.
//
//	Start ──▶ tripod-wasm compile ──▶ tripod-wasm worker ◀── HTTP/2 on loopback ── the caller
//	                                      └ ends with this process
//
// Compilation, worker and limits are those of a node. The package must not know about pods, images or networks.
package standalone

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
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/code"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/launch"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/internal/unixsocket"
)

// Config configures the compiler and the worker.
type Config struct {
	// Program is the path of tripod-wasm. If it is empty, tripod-wasm is looked for beside the executable of this process and
	// in PATH.
	Program string
	// UID and GID are the user and group of the compiler and the worker.
	UID, GID int
	// MaxMemory bounds the size of each linear memory, in bytes; 0 means the worker's default. Holdings limit the resources
	// that the guests hold.
	MaxMemory uint64
	Holdings  Holdings
	// CompileTimeout and CompileMemory (bytes) bound the compilation; 0 means the default. QuickCode lets a large component
	// begin with code that is not optimised.
	CompileTimeout time.Duration
	CompileMemory  int64
	QuickCode      bool
}

// Holdings limit the resources that guests hold in their worker.
type Holdings = workerapi.Holdings

// Limits of a standalone component, in bytes: of the memories of its guests together, and of their log.
const (
	maxMemory = 1 << 30
	maxLog    = 8 << 20
)

// Guest is a gRPC component.
type Guest struct {
	Name string
	Wasm []byte
	// Descriptors is a serialized google.protobuf.FileDescriptorSet, and Services are those of its services that the
	// component serves.
	Descriptors []byte
	Services    []string
	Env         []string // KEY=value
}

// Worker runs a component, which answers on loopback, over HTTP/2 in clear text. It has no files and cannot open connections.
type Worker struct {
	// Address is where the component answers.
	Address netip.AddrPort

	name   string
	log    *os.File           // in memory, so that nothing of it remains if this process is killed
	stop   context.CancelFunc // kills the worker
	exited <-chan struct{}
	client *workerapi.Client
}

// Start compiles a component and starts it in a worker, within the limits of the configuration. The worker
// runs as the configuration's user, in namespaces of its own, if this process is root, and otherwise as the user of this
// process. It ends with this process, with ctx, or by Close.
//
// Start returns errdefs.ErrNotFound if there is no tripod-wasm, and errdefs.ErrInvalidArgument if the
// component is invalid.
func Start(ctx context.Context, c Config, g Guest) (_ *Worker, err error) {
	program, err := c.program()
	if err != nil {
		return nil, err
	}
	quick := c.QuickCode && len(g.Wasm) > code.QuickAbove
	compiled, err := code.Compile(ctx, c.code(program), g.Wasm, quick)
	if quick && errdefs.IsInvalidArgument(err) { // as far as the quick compiler goes
		quick = false
		compiled, err = code.Compile(ctx, c.code(program), g.Wasm, quick)
	}
	if err != nil {
		return nil, err
	}
	defer compiled.Close()
	s := &Worker{name: g.Name}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	if err := s.launch(ctx, c, program); err != nil {
		return nil, err
	}
	load := workerapi.Code{Digest: digest.FromBytes(g.Wasm).String(), Image: workerapi.File{File: compiled}, Quick: quick,
		Descriptors: g.Descriptors, Services: g.Services}
	loaded, err := s.client.Load(ctx, load)
	if err != nil {
		return nil, err
	}
	return s, s.serve(ctx, c, g, loaded.Digest)
}

// Compile compiles a component as a node does, within the limits of the configuration, and returns the code with
// the fingerprint of the engine. The errors are those of Start.
func Compile(ctx context.Context, c Config, wasm []byte) (made []byte, engine string, err error) {
	program, err := c.program()
	if err != nil {
		return nil, "", err
	}
	if engine, err = program.Engine(); err != nil {
		return nil, "", err
	}
	compiled, err := code.Compile(ctx, c.code(program), wasm, false)
	if err != nil {
		return nil, "", err
	}
	defer compiled.Close()
	made, err = io.ReadAll(compiled)
	return made, engine, err
}

func (c Config) program() (launch.Program, error) {
	path, err := launch.Find(c.Program)
	return launch.Program{Path: path, UID: c.UID, GID: c.GID}, err
}

func (c Config) code(program launch.Program) code.Config {
	return code.Config{Program: program, Timeout: c.CompileTimeout, Memory: c.CompileMemory}
}

// launch starts the worker and connects to it.
func (s *Worker) launch(ctx context.Context, c Config, program launch.Program) error {
	uid, gid := c.UID, c.GID
	if os.Geteuid() != 0 {
		uid, gid = os.Geteuid(), os.Getegid()
	}
	config, err := json.Marshal(workerapi.WorkerConfig{
		Name: "standalone", UID: uid, GID: gid, MaxMemory: c.MaxMemory, LogSizeMax: maxLog, LogLevel: slog.LevelWarn.String(),
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
		launch.CloseAll([]*os.File{control, data})
		return err
	}
	defer ready.Close()
	running, stop := context.WithCancel(ctx)
	s.stop = stop
	cmd, err := program.Unprivileged(running, []*os.File{control, data, writer}, "worker", string(config))
	if err != nil {
		return err
	}
	log := &launch.Tail{Limit: 4 << 10}
	cmd.Stderr, cmd.WaitDelay = log, time.Second
	cmd.SysProcAttr.Pdeathsig = unix.SIGKILL
	if err := s.start(cmd); err != nil {
		return fmt.Errorf("start %s: %w", program.Path, err)
	}
	if err := launch.AwaitReady(ctx, ready); err != nil {
		return fmt.Errorf("%w: %s", err, launch.LastLine(log.Bytes()))
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
	if control, err = unixsocket.Listen(filepath.Join(dir, launch.ControlSocket)); err != nil {
		return nil, nil, nil, err
	}
	if data, err = unixsocket.Listen(filepath.Join(dir, launch.DataSocket)); err == nil {
		conn, err = unixsocket.Dial(ctx, filepath.Join(dir, launch.ControlSocket)) // accepted by the worker
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
func (s *Worker) start(cmd *exec.Cmd) error {
	started, exited := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(exited)
		runtime.LockOSThread()
		err := cmd.Start()
		launch.CloseAll(cmd.ExtraFiles)
		started <- err
		if err == nil {
			_ = cmd.Wait() // Close kills it
		}
	}()
	s.exited = exited
	return <-started
}

// serve starts the component's server.
func (s *Worker) serve(ctx context.Context, c Config, g Guest, codeDigest string) error {
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
	if s.log, err = launch.MemoryFile("log"); err != nil {
		return err
	}
	_, err = s.client.Start(ctx, workerapi.PodSpec{
		ID: g.Name, Component: g.Name, Digest: codeDigest, Args: []string{g.Name}, Env: g.Env, Log: workerapi.File{File: s.log},
		Resources: workerapi.Resources{MemoryBytes: maxMemory}, Holdings: c.Holdings,
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
func (s *Worker) Profile(ctx context.Context, nth int, call func(context.Context)) (Profile, error) {
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
func (s *Worker) Output(maxBytes int) ([]byte, error) {
	log, err := io.ReadAll(io.NewSectionReader(s.log, 0, maxLog))
	if err != nil {
		return nil, err
	}
	output := &launch.Tail{Limit: maxBytes}
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
	return output.Bytes(), nil
}

// Close ends the worker.
func (s *Worker) Close() error {
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
