package network

import (
	"encoding/binary"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// kernel returns a socket that acts as netlink, and sends it parts of dumps.
func kernel(t *testing.T) (fd int, send func(kind, flags uint16, data []byte)) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(pair[0]); _ = unix.Close(pair[1]) })
	return pair[0], func(kind, flags uint16, data []byte) {
		t.Helper()
		message := make([]byte, unix.NLMSG_HDRLEN, unix.NLMSG_HDRLEN+len(data))
		binary.NativeEndian.PutUint32(message, uint32(unix.NLMSG_HDRLEN+len(data)))
		binary.NativeEndian.PutUint16(message[4:], kind)
		binary.NativeEndian.PutUint16(message[6:], flags)
		if err := unix.Send(pair[1], append(message, data...), 0); err != nil {
			t.Fatal(err)
		}
	}
}

// TestInterruptedDumpIsReadToItsEnd: what an interrupted dump leaves unread would be the answer to the next request.
func TestInterruptedDumpIsReadToItsEnd(t *testing.T) {
	fd, send := kernel(t)
	link := nl.NewIfInfomsg(unix.AF_UNSPEC).Serialize()
	done := make([]byte, 4)
	send(unix.RTM_NEWLINK, unix.NLM_F_MULTI|unix.NLM_F_DUMP_INTR, link)
	send(unix.RTM_NEWLINK, unix.NLM_F_MULTI, link)
	send(unix.NLMSG_DONE, unix.NLM_F_MULTI, done)
	if links, err := receiveLinks(fd); len(links) != 2 || !errors.Is(err, netlink.ErrDumpInterrupted) {
		t.Errorf("an interrupted dump: %d links, %v; want 2 and ErrDumpInterrupted", len(links), err)
	}
	send(unix.RTM_NEWLINK, unix.NLM_F_MULTI, link)
	send(unix.NLMSG_DONE, unix.NLM_F_MULTI, done)
	if links, err := receiveLinks(fd); len(links) != 1 || err != nil {
		t.Errorf("the dump after it: %d links, %v; want 1", len(links), err)
	}
}

// TestLostAnswerOfNetlink: a netlink socket on which nothing was asked stays silent, like one whose answer was lost.
func TestLostAnswerOfNetlink(t *testing.T) {
	fd, err := routeSocket(time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := receiveLinks(fd); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v, want os.ErrDeadlineExceeded", err)
	}
}
