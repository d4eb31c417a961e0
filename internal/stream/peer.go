package stream

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// Has a client gone whose data nobody reads? Its end cannot arrive behind a full receive window, so our own socket does
// not know. But the client is on this machine (see Config.Address), and the kernel knows its socket: inet_diag, as
// ss(8) uses it.

// tcpEstablished is the state of a socket whose two ends are open (net/tcp_states.h).
const tcpEstablished = 1

// unread is how many bytes have arrived on the connection that nobody has read.
func unread(conn net.Conn) int {
	n := 0
	control(conn, func(fd int) { n, _ = unix.IoctlGetInt(fd, unix.SIOCINQ) })
	return n
}

// control calls f with the descriptor of a connection that is open.
func control(conn net.Conn, f func(fd int)) {
	if socket, ok := conn.(syscall.Conn); ok {
		if raw, err := socket.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { f(int(fd)) })
		}
	}
}

// left tells whether the other end of a connection within this machine was closed. When the kernel cannot tell, as one
// without inet_diag, it was not.
func peerGone(conn net.Conn) bool {
	known := false // from our own socket: an end that has arrived, or a reset
	control(conn, func(fd int) {
		info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		known = err == nil && info.State != tcpEstablished
	})
	return known || unread(conn) > 0 && peerClosed(conn)
}

// peerClosed looks at the client's own socket.
func peerClosed(conn net.Conn) bool {
	ours, ok1 := conn.LocalAddr().(*net.TCPAddr)
	theirs, ok2 := conn.RemoteAddr().(*net.TCPAddr)
	if !ok1 || !ok2 {
		return false
	}
	state, err := socketState(theirs, ours)
	if errors.Is(err, unix.ENOENT) {
		_, err = socketState(ours, theirs) // surely there: else the answer means nothing
		return err == nil
	}
	return err == nil && state != tcpEstablished
}

// socketState is the state of the TCP socket with these ends; ENOENT when there is none.
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
	n, _, err := unix.Recvfrom(fd, answer, unix.MSG_DONTWAIT) // the kernel has answered within Sendto
	if err != nil {
		return 0, err
	}
	return diagAnswer(answer[:n])
}

// diagAnswer reads a message of the kernel: a struct nlmsghdr and then a struct inet_diag_msg, which begins with the family and
// the state, or a negative error number.
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

// diagRequest asks for one socket in any state: a struct nlmsghdr and a struct inet_diag_req_v2 (linux/inet_diag.h).
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
	binary.NativeEndian.PutUint32(b[4:], ^uint32(0)) // states
	binary.BigEndian.PutUint16(b[8:], uint16(local.Port))
	binary.BigEndian.PutUint16(b[10:], uint16(remote.Port))
	copy(b[12:28], from)
	copy(b[28:44], to)
	binary.NativeEndian.PutUint64(b[48:], ^uint64(0)) // any cookie
	return head
}
