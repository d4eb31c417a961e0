package stream

import (
	"encoding/binary"
	"errors"
	"net"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Has a client gone whose data nobody reads? Its end cannot arrive behind a full receive window, so our own socket does
// not know. But the client is on this machine (see Config.Address), and the kernel tells of its socket: inet_diag, what
// ss(8) asks.

// tcpEstablished is the state of a socket that nobody has closed (net/tcp_states.h).
const tcpEstablished = 1

// unread is how many bytes have arrived on the connection that nobody has read.
func unread(conn net.Conn) int {
	n := 0
	if tcp, ok := conn.(*net.TCPConn); ok {
		if raw, err := tcp.SyscallConn(); err == nil {
			raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.SIOCINQ) })
		}
	}
	return n
}

// peerGone tells whether the other end of a connection within this machine was closed. When the kernel cannot tell,
// as one without inet_diag, it was not.
func peerGone(conn net.Conn) bool {
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
	req := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, 0)
	req.AddRawData(diagRequest(local, remote))
	answers, err := req.Execute(unix.NETLINK_INET_DIAG, nl.SOCK_DIAG_BY_FAMILY)
	if err != nil {
		return 0, err
	}
	if len(answers) == 0 || len(answers[0]) < 2 {
		return 0, errors.New("inet_diag gave no answer")
	}
	return answers[0][1], nil // struct inet_diag_msg: family, state, …
}

// diagRequest is a struct inet_diag_req_v2 (linux/inet_diag.h) for one socket in any state.
func diagRequest(local, remote *net.TCPAddr) []byte {
	family, from, to := byte(unix.AF_INET), local.IP.To4(), remote.IP.To4()
	if from == nil || to == nil {
		family, from, to = unix.AF_INET6, local.IP.To16(), remote.IP.To16()
	}
	b := make([]byte, 56)
	b[0], b[1] = family, unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(b[4:], ^uint32(0)) // states
	binary.BigEndian.PutUint16(b[8:], uint16(local.Port))
	binary.BigEndian.PutUint16(b[10:], uint16(remote.Port))
	copy(b[12:28], from)
	copy(b[28:44], to)
	binary.NativeEndian.PutUint64(b[48:], ^uint64(0)) // any cookie
	return b
}
