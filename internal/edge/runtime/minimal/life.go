package minimal

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

const (
	inFlight = 32                     // messages between the program and the manager, in each direction
	drain    = 500 * time.Millisecond // time to read the data that an ended program left in its socket and pipes
)

var (
	errStartedAgain = fmt.Errorf("the runtime was started again: %w", errdefs.ErrUnavailable)
	errStopped      = fmt.Errorf("the runtime was stopped: %w", errdefs.ErrUnavailable)
)

// life is one run of the program.
type life struct {
	cfg    *Config
	cmd    *exec.Cmd
	stdin  *os.File // write end of the program's stdin, kept open so that reads block
	conn   *channel.Conn
	in     chan channel.Message
	out    chan channel.Message
	up     chan struct{} // closed once the program has connected
	exited chan struct{} // closed once the process has ended and its group was killed

	reaping sync.Mutex // while this lock is held and reaped is false, the pid still belongs to the process
	reaped  bool

	once  sync.Once
	lost  chan struct{} // closed when sending ends, after the field why is set
	why   error
	ended chan struct{} // closed when receiving ends

	tail tail // the end of the output, for errors
}

// begin starts the program and waits until it has connected.
func (r *Runtime) begin(ctx context.Context) (*life, error) {
	listener, path, err := listen(r.cfg.Dir, r.cfg.Index)
	if err != nil {
		return nil, err
	}
	defer listener.Close() // after one connection; also removes the socket
	l := &life{
		cfg: &r.cfg,
		in:  make(chan channel.Message, inFlight), out: make(chan channel.Message, inFlight),
		up: make(chan struct{}), exited: make(chan struct{}), lost: make(chan struct{}), ended: make(chan struct{}),
	}
	output, err := l.start(path)
	if err != nil {
		return nil, err
	}
	conn, err := l.accept(ctx, listener)
	if err != nil {
		l.end(err)
		<-l.exited
		output.Close()
		<-output.done
		return nil, fmt.Errorf("%w%s", err, l.tail.suffix())
	}
	l.conn = channel.NewConn(conn, channel.ConnOptions{MaxFrame: r.cfg.MaxFrame, Wide: true, Timeout: r.cfg.WriteTimeout})
	close(l.up)
	go l.write()
	go l.read(conn, output)
	return l, nil
}

// listen makes the socket, after removing a stale one.
func listen(dir string, index int) (*net.UnixListener, string, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, "", fmt.Errorf("the directory of sockets: %w", err)
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return nil, "", fmt.Errorf("the directory of sockets: %w", err)
	}
	owner, _ := info.Sys().(*syscall.Stat_t)
	if !info.IsDir() || owner == nil || int(owner.Uid) != os.Geteuid() || info.Mode().Perm()&0o022 != 0 {
		return nil, "", fmt.Errorf("the directory of sockets %s can be written to by others (%s): remove it, or choose another one: %w", dir,
			info.Mode(), errdefs.ErrFailedPrecondition)
	}
	path := SocketPath(dir, index)
	switch info, err := os.Lstat(path); {
	case err == nil && info.Mode().Type() != fs.ModeSocket:
		return nil, "", fmt.Errorf("the socket %s: something else is there (%s), remove it: %w", path, info.Mode(), errdefs.ErrFailedPrecondition)
	case err == nil:
		if err := os.Remove(path); err != nil {
			return nil, "", fmt.Errorf("the stale socket: %w", err)
		}
	case !errors.Is(err, fs.ErrNotExist):
		return nil, "", fmt.Errorf("the socket: %w", err)
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, "", fmt.Errorf("the socket %s: %w (%w)", path, errdefs.ErrUnavailable, err)
	}
	return listener, path, nil
}

// start starts the process.
func (l *life) start(path string) (*output, error) {
	args := append(append([]string{}, l.cfg.Command[1:]...), strconv.Itoa(l.cfg.Index))
	l.cmd = exec.Command(l.cfg.Command[0], args...)
	l.cmd.Env = append(append(os.Environ(), EnvSocket+"="+path, EnvWire+"=wide"), l.cfg.Env...)
	l.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
	input, stdin, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer input.Close()
	logs, said, err := os.Pipe()
	if err != nil {
		stdin.Close()
		return nil, err
	}
	defer said.Close()
	l.stdin = stdin
	l.cmd.Stdin, l.cmd.Stdout, l.cmd.Stderr = input, said, said
	if err := l.fork(); err != nil {
		stdin.Close()
		logs.Close()
		return nil, fmt.Errorf("the program %s: %w (%w)", l.cfg.Command[0], errdefs.ErrUnavailable, err)
	}
	l.cfg.Log.Info("runtime program started", "command", l.cmd.Args, "pid", l.cmd.Process.Pid)
	return l.follow(logs), nil
}

// fork starts the process on a thread that is locked until the process has been reaped. If the thread ended earlier,
// Pdeathsig would kill the process.
func (l *life) fork() error {
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := l.cmd.Start()
		started <- err
		if err != nil {
			return
		}
		l.reap()
		l.cfg.Log.Info("runtime program exited", "pid", l.cmd.Process.Pid, "status", l.cmd.ProcessState.String())
		close(l.exited)
	}()
	return <-started
}

// reap waits for the process to end. It kills the rest of the process group before it reaps the zombie, because the
// zombie keeps the pid from being reused.
func (l *life) reap() {
	for unix.Waitid(unix.P_PID, l.cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil) == unix.EINTR {
	}
	l.kill()
	l.reaping.Lock()
	defer l.reaping.Unlock()
	l.reaped = true
	_ = l.cmd.Wait() // sets ProcessState
}

// kill kills the process group.
func (l *life) kill() {
	l.reaping.Lock()
	defer l.reaping.Unlock()
	if l.reaped {
		return
	}
	if err := unix.Kill(-l.cmd.Process.Pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
		l.cfg.Log.Warn("cannot kill the runtime program", "pid", l.cmd.Process.Pid, "err", err)
	}
}

// accept waits for the program's connection.
func (l *life) accept(ctx context.Context, listener *net.UnixListener) (net.Conn, error) {
	type result struct {
		conn net.Conn
		err  error
	}
	accepted := make(chan result, 1)
	go func() {
		conn, err := listener.Accept()
		accepted <- result{conn, err}
	}()
	timeout := time.NewTimer(l.cfg.ConnectTimeout)
	defer timeout.Stop()
	var why error
	select {
	case a := <-accepted:
		return a.conn, a.err
	case <-l.exited:
		why = fmt.Errorf("the program ended before it connected (%s): %w", l.cmd.ProcessState, errdefs.ErrUnavailable)
	case <-timeout.C:
		why = fmt.Errorf("the program did not connect to %s within %s: %w", listener.Addr(), l.cfg.ConnectTimeout, errdefs.ErrUnavailable)
	case <-ctx.Done():
		why = ctx.Err()
	}
	listener.Close()
	if a := <-accepted; a.conn != nil { // the program connected before Close
		a.conn.Close()
	}
	return nil, why
}

// end kills the process group. Messages that the program has already sent are still read. Later calls do nothing.
func (l *life) end(why error) {
	l.once.Do(func() {
		l.why = why
		close(l.lost)
		l.kill()
		l.stdin.Close()
	})
}

func (l *life) cause() error {
	return fmt.Errorf("runtime %q is lost: %w", l.cfg.Info.Name, l.why)
}

// write sends the manager's messages.
func (l *life) write() {
	for {
		select {
		case m := <-l.out:
			if err := l.conn.Write(m); err != nil {
				l.end(fmt.Errorf("it does not read messages: %w", err))
				return
			}
		case <-l.lost:
			return
		}
	}
}

// read receives the program's messages until the connection ends, or until shortly after the process has ended.
func (l *life) read(conn net.Conn, output *output) {
	go func() {
		select {
		case <-l.exited:
		case <-l.lost:
		}
		_ = conn.SetReadDeadline(time.Now().Add(drain)) // a child of the program may keep the connection open
	}()
	for {
		m, err := l.conn.Read()
		if err != nil {
			l.end(fmt.Errorf("%w (%w)%s", errdefs.ErrUnavailable, err, l.status()))
			break
		}
		if !l.deliver(m) {
			break
		}
	}
	l.conn.Close()
	<-l.exited
	output.drain()
	close(l.ended)
}

// deliver passes a message to the manager. If the run has ended, deliver waits only briefly for the manager, and then
// reports false.
func (l *life) deliver(m channel.Message) bool {
	select {
	case l.in <- m:
		return true
	case <-l.lost:
	}
	timeout := time.NewTimer(drain)
	defer timeout.Stop()
	select {
	case l.in <- m:
		return true
	case <-timeout.C:
		return false
	}
}

// status returns a text that says how the process ended, or "" while it runs.
func (l *life) status() string {
	select {
	case <-l.exited:
		return ": the program has ended (" + l.cmd.ProcessState.String() + ")"
	default:
		return ""
	}
}

// stop asks the program to stop, and kills it after the given time.
func (l *life) stop(within time.Duration) {
	timeout := time.NewTimer(within)
	defer timeout.Stop()
	select {
	case l.out <- channel.Message{Header: channel.Header{Control: true, Arg: wire.Stop}, Payload: nil}:
	case <-l.lost:
	case <-timeout.C:
		l.end(errStopped)
	}
	select {
	case <-l.lost:
	case <-l.exited:
	case <-timeout.C:
		l.cfg.Log.Warn("runtime program does not stop; killing it", "pid", l.cmd.Process.Pid)
	}
	l.end(errStopped)
	<-l.ended
}

// suffix returns the end of the output as the last part of an error's text.
func (t *tail) suffix() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := strings.TrimSpace(string(t.data)); s != "" {
		return "; it said: " + s
	}
	return ""
}
