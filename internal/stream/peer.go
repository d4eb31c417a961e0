package stream

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// The functions in this file find out whether a client is gone even while nothing reads its data. If the receive window
// is full, the client's FIN cannot arrive, so our socket does not show that the client is gone. But the client is on
// this machine (see Config.Address), so inet_diag (linux/inet_diag.h) shows the client's socket.

// tcpEstablished is the state of a socket that is open in both directions (net/tcp_states.h).
const tcpEstablished = 1

// unread returns the number of bytes that have arrived on the connection but are not read yet.
func unread(conn net.Conn) int {
	n := 0
	control(conn, func(fd int) { n, _ = unix.IoctlGetInt(fd, unix.SIOCINQ) })
	return n
}

// control calls f with the descriptor of a connection, unless the connection is closed.
func control(conn net.Conn, f func(fd int)) {
	if socket, ok := conn.(syscall.Conn); ok {
		if raw, err := socket.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { f(int(fd)) })
		}
	}
}

// peerGone reports whether the other end of a connection has been closed. That end must be on this machine. It returns
// false if the kernel cannot tell, for example without inet_diag.
func peerGone(conn net.Conn) bool {
	known := false // our own socket shows a FIN or a reset
	control(conn, func(fd int) {
		info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		known = err == nil && info.State != tcpEstablished
	})
	return known || unread(conn) > 0 && peerClosed(conn)
}

// peerClosed reports whether the client's own socket is closed or closing.
func peerClosed(conn net.Conn) bool {
	ours, ok1 := conn.LocalAddr().(*net.TCPAddr)
	theirs, ok2 := conn.RemoteAddr().(*net.TCPAddr)
	if !ok1 || !ok2 {
		return false
	}
	state, err := socketState(theirs, ours)
	if errors.Is(err, unix.ENOENT) {
		_, err = socketState(ours, theirs) // our socket must exist; otherwise the answers are wrong
		return err == nil
	}
	return err == nil && state != tcpEstablished
}

// socketState returns the state of the TCP socket with these addresses, or ENOENT if there is no such socket.
func socketState(local, remote *net.TCPAddr) (uint8, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_INET_DIAG)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	if err := unix.Sendto(fd, diagRequest(local, remote), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return 0, err
	}
	answer := make([]byte, 1024)
	n, _, err := unix.Recvfrom(fd, answer, unix.MSG_DONTWAIT) // the kernel answers before Sendto returns
	if err != nil {
		return 0, err
	}
	return diagAnswer(answer[:n])
}

// diagAnswer decodes the kernel's answer. The answer is a struct nlmsghdr, followed by either a struct inet_diag_msg or
// a negative error number. A struct inet_diag_msg begins with the family and the state.
func diagAnswer(b []byte) (uint8, error) {
	if len(b) < unix.NLMSG_HDRLEN+4 {
		return 0, errors.New("inet_diag gave no answer")
	}
	kind, body := binary.NativeEndian.Uint16(b[4:]), b[unix.NLMSG_HDRLEN:]
	switch kind {
	case unix.SOCK_DIAG_BY_FAMILY:
		return body[1], nil
	case unix.NLMSG_ERROR:
		return 0, unix.Errno(uintptr(-int32(binary.NativeEndian.Uint32(body))))
	}
	return 0, fmt.Errorf("inet_diag answered with a message of kind %d", kind)
}

// diagRequest encodes a request for a socket in any state: a struct nlmsghdr and a struct inet_diag_req_v2.
func diagRequest(local, remote *net.TCPAddr) []byte {
	family, from, to := byte(unix.AF_INET), local.IP.To4(), remote.IP.To4()
	if from == nil || to == nil {
		family, from, to = unix.AF_INET6, local.IP.To16(), remote.IP.To16()
	}
	const bodyLen = 56
	head := make([]byte, unix.NLMSG_HDRLEN+bodyLen)
	binary.NativeEndian.PutUint32(head, uint32(len(head)))
	binary.NativeEndian.PutUint16(head[4:], unix.SOCK_DIAG_BY_FAMILY)
	binary.NativeEndian.PutUint16(head[6:], unix.NLM_F_REQUEST)
	b := head[unix.NLMSG_HDRLEN:]
	b[0], b[1] = family, unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(b[4:], ^uint32(0)) // any state
	binary.BigEndian.PutUint16(b[8:], uint16(local.Port))
	binary.BigEndian.PutUint16(b[10:], uint16(remote.Port))
	copy(b[12:28], from)
	copy(b[28:44], to)
	binary.NativeEndian.PutUint64(b[48:], ^uint64(0)) // any cookie
	return head
}
