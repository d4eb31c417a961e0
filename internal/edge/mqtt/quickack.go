package mqtt

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// quickAckConn makes the kernel acknowledge TCP segments immediately, instead of after up to 40 ms. It sets
// TCP_QUICKACK again after each read, because the kernel can reset this option (tcp(7)). A broker that uses Nagle's
// algorithm, like mosquitto, waits for the acknowledgement before it sends the next small packet.
type quickAckConn struct {
	net.Conn
	raw syscall.RawConn
}

func quickAck(c net.Conn) net.Conn {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return c
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return c
	}
	return quickAckConn{c, raw}
}

func (c quickAckConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err == nil {
		// A failure only makes the connection slower.
		_ = c.raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_QUICKACK, 1) })
	}
	return n, err
}
