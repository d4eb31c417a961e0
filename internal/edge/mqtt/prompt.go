package mqtt

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// promptConn acknowledges what it has read at once. A broker that leaves Nagle's algorithm on, as mosquitto does, sends the next
// small packet only then, and the kernel would wait up to 40 ms (tcp(7), TCP_QUICKACK; it must be set again after each read).
type promptConn struct {
	net.Conn
	raw syscall.RawConn
}

func prompt(c net.Conn) net.Conn {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return c
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return c
	}
	return promptConn{c, raw}
}

func (c promptConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err == nil {
		// It is about speed only.
		_ = c.raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_QUICKACK, 1) })
	}
	return n, err
}
