package guestagent

import (
	"errors"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
)

// connectTime bounds the time to connect to localhost, because a server whose backlog is full does not answer.
const connectTime = 10 * time.Second

// dial connects to a port of localhost and copies data in both directions until both directions have ended or one of
// them has failed.
func (j *job) dial(r wire.Dial) wire.Result {
	fd, err := connect(int(r.Port))
	if err != nil {
		return failed(wire.ClassUnavailable, err)
	}
	conn := os.NewFile(uintptr(fd), "tcp") // non-blocking, so that Close interrupts reads and writes
	defer conn.Close()
	j.stream.Grant(wire.ChannelIn)
	ended := make(chan struct{})
	defer close(ended)
	go func() {
		select {
		case <-j.stream.Done():
			_ = conn.Close()
		case <-ended:
		}
	}()
	sent := make(chan error, 1)
	go func() { sent <- j.send(conn) }()
	err = j.receive(conn)
	if err == nil {
		err = <-sent
	}
	if err != nil {
		return failed(wire.ClassUnavailable, err)
	}
	return wire.Result{}
}

// send copies data from the host to conn. When the host shuts down its writing side, send shuts down the writing side
// of conn.
func (j *job) send(conn *os.File) error {
	buf := make([]byte, copyBuffer)
	for {
		n, err := j.stream.Read(wire.ChannelIn, buf, nil)
		if n > 0 {
			if _, err := conn.Write(buf[:n]); err != nil {
				return err
			}
		}
		if err == io.EOF {
			j.closedWrite.Store(true)
			_ = withFD(conn, func(fd int) error { return unix.Shutdown(fd, unix.SHUT_WR) })
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// tcpClose is TCP_CLOSE in linux/tcp_states.h.
const tcpClose = 7

// wasReset reports whether the server reset the connection. A read does not always show a reset, because reads return
// io.EOF if a write has already returned the error. So wasReset checks the state of the connection. Until the agent
// shuts down the writing side, only a reset closes the connection in both directions.
func (j *job) wasReset(conn *os.File) bool {
	var info *unix.TCPInfo
	err := withFD(conn, func(fd int) (err error) {
		info, err = unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		return err
	})
	return err == nil && info.State == tcpClose && !j.closedWrite.Load()
}

// receive copies data from conn to the host, and closes the stream's channel at the end of the data.
func (j *job) receive(conn *os.File) error {
	buf := make([]byte, copyBuffer)
	for {
		n, err := conn.Read(buf)
		if n > 0 {
			if _, err := j.stream.Write(wire.ChannelOut, buf[:n], nil); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			if j.wasReset(conn) {
				return os.NewSyscallError("read", unix.ECONNRESET)
			}
			j.stream.Close(wire.ChannelOut)
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// connect connects to 127.0.0.1 or, if that fails, to [::1].
func connect(port int) (int, error) {
	fd, err := connectTo(unix.AF_INET, &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}})
	if err == nil {
		return fd, nil
	}
	six := &unix.SockaddrInet6{Port: port}
	six.Addr[15] = 1
	if fd, err6 := connectTo(unix.AF_INET6, six); err6 == nil {
		return fd, nil
	}
	return -1, os.NewSyscallError("connect", err)
}

func connectTo(family int, address unix.Sockaddr) (int, error) {
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	err = unix.Connect(fd, address)
	if err == unix.EINPROGRESS {
		err = awaitConnected(fd)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	return fd, nil
}

func awaitConnected(fd int) error {
	deadline := time.Now().Add(connectTime)
	for {
		left := time.Until(deadline).Milliseconds()
		if left <= 0 {
			return unix.ETIMEDOUT
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, int(left))
		if err == unix.EINTR || err == nil && n == 0 {
			continue
		}
		if err != nil {
			return err
		}
		code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		if err != nil {
			return err
		}
		if code != 0 {
			return unix.Errno(code)
		}
		return nil
	}
}
