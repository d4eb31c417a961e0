package notifier

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"time"
	"unsafe"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/fdpass"
	"github.com/tripod-run/tripod/internal/guard"
)

// Event is a call that a profile has failed.
type Event struct {
	// Metadata is the text that Apply put into the profile.
	Metadata string
	// PID is the calling process, as the daemon sees it. Syscall is the name of the call.
	PID     int
	Syscall string
}

// Listener accepts the kernel's descriptors from OCI runtimes, and answers the notifications.
type Listener struct {
	socket *net.UnixListener
	handle func(Event)
	log    *slog.Logger
}

// receiveTime bounds the wait for an OCI runtime's message, and maxState its size. acceptPause is the time between two
// attempts to accept a connection.
const (
	receiveTime = 10 * time.Second
	maxState    = 1 << 20
	acceptPause = 100 * time.Millisecond
)

// Listen makes the socket and replaces that of an earlier daemon. The directory must be private. The handler is called
// once per failed call, and delays the caller until it returns.
func Listen(path string, handle func(Event), log *slog.Logger) (*Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	socket, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen for seccomp notifications: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("listen for seccomp notifications: %w", err), socket.Close())
	}
	l := &Listener{socket: socket, handle: handle, log: log}
	go guard.Func(log, "seccomp notifications", l.accept)()
	return l, nil
}

// Close ends the listener. Descriptors that it has received stay open until their containers end.
func (l *Listener) Close() error { return l.socket.Close() }

func (l *Listener) accept() {
	for failing := false; ; {
		conn, err := l.socket.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil && !failing {
			l.log.Error("cannot accept containers' seccomp notifiers, will retry", "err", err)
		}
		if failing = err != nil; failing {
			time.Sleep(acceptPause) // pacing: nothing signals that a descriptor is free
			continue
		}
		go guard.Func(l.log, "seccomp notifications of a container", func() {
			defer conn.Close()
			state, file, err := receive(conn)
			if err != nil {
				l.log.Error("receive a container's seccomp notifier", "err", err)
				return
			}
			defer file.Close()
			conn.Close() // the OCI runtime needs no answer
			if err := l.serve(file, state.Metadata); err != nil {
				l.log.Error("seccomp notifications of a container end", "container", state.State.ID, "err", err)
			}
		})()
	}
}

// receive reads the message of an OCI runtime: its state in JSON, with one descriptor. A long state arrives in pieces.
func receive(conn *net.UnixConn) (state specs.ContainerProcessState, file *os.File, err error) {
	if err := conn.SetDeadline(time.Now().Add(receiveTime)); err != nil {
		return state, nil, err
	}
	stream := fdpass.NewStream(conn)
	defer stream.Close()
	if err := json.NewDecoder(io.LimitReader(stream, maxState)).Decode(&state); err != nil {
		return state, nil, err
	}
	file, err = stream.TakeOne("seccomp notifier")
	return state, file, err
}

// notification and response are struct seccomp_notif and struct seccomp_notif_resp of the kernel.
type notification struct {
	id          uint64
	pid, flags  uint32
	number      int32
	arch        uint32
	instruction uint64
	args        [6]uint64
}

type response struct {
	id    uint64
	value int64
	err   int32
	flags uint32
}

// serve answers the notifications of one container until its processes have ended.
func (l *Listener) serve(file *os.File, metadata string) error {
	conn, err := file.SyscallConn()
	if err != nil {
		return err
	}
	for {
		var n notification
		var ended bool
		var failed error
		err := conn.Read(func(fd uintptr) bool {
			poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			if _, failed = unix.Poll(poll, 0); failed != nil {
				return true
			}
			if poll[0].Revents&unix.POLLIN == 0 {
				ended = poll[0].Revents&(unix.POLLHUP|unix.POLLERR) != 0
				return ended
			}
			failed = ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(&n))
			return true
		})
		switch {
		case err != nil:
			return err
		case ended:
			return nil
		case errors.Is(failed, unix.ENOENT), errors.Is(failed, unix.EINTR): // the caller was killed
			continue
		case failed != nil:
			return failed
		}
		l.handle(Event{Metadata: metadata, PID: int(n.pid), Syscall: nameOf(n.number, n.arch)})
		answer := response{id: n.id, err: -int32(unix.EPERM)}
		err = conn.Control(func(fd uintptr) { failed = ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&answer)) })
		if err := errors.Join(err, failed); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
}

func ioctl(fd uintptr, request uint, argument unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, uintptr(request), uintptr(argument)); errno != 0 {
		return errno
	}
	return nil
}
