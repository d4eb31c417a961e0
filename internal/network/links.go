package network

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/network/netthread"
)

// links lists the interfaces of a namespace; "" means the host's. Only opening the netlink socket needs a thread inside
// the namespace.
//
// The socket is used without netlink.Handle, which registers it with the poller and takes twice as long. A kubelet asks
// for the traffic of all pods every few seconds.
func (m *Manager) links(netnsPath string) ([]netlink.Link, error) {
	var fd int
	err := inNetns(netnsPath, func() (err error) {
		fd, err = routeSocket(netthread.AnswerTime)
		return err
	})
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	links, err := dumpLinks(fd)
	if errors.Is(err, netlink.ErrDumpInterrupted) { // an interface was added or removed during the dump
		links, err = dumpLinks(fd)
	}
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, fmt.Errorf("list interfaces of %s: %w", netnsPath, err)
	}
	return links, nil
}

// dumpBuffers holds buffers for a message of a dump, whose size the kernel limits to 32 KiB.
var dumpBuffers = sync.Pool{New: func() any { return new([32 << 10]byte) }}

// routeSocket opens a netlink socket whose reads fail with EAGAIN if the kernel does not answer in time.
func routeSocket(timeout time.Duration) (fd int, err error) {
	fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return -1, err
	}
	limit := unix.NsecToTimeval(timeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// dumpLinks requests all interfaces from a netlink socket. If the list changed during the dump, it returns what it got
// and netlink.ErrDumpInterrupted, and the socket can be used for another dump.
func dumpLinks(fd int) ([]netlink.Link, error) {
	request := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
	request.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	if err := unix.Sendto(fd, request.Serialize(), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, err
	}
	return receiveLinks(fd)
}

// receiveLinks reads a dump to its end, even if it was interrupted, because the kernel refuses a second dump while the
// first goes on.
func receiveLinks(fd int) (links []netlink.Link, err error) {
	buf := dumpBuffers.Get().(*[32 << 10]byte)
	defer dumpBuffers.Put(buf)
	var interrupted error
	for {
		n, _, err := unix.Recvfrom(fd, buf[:], 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if errors.Is(err, unix.EAGAIN) {
			return nil, fmt.Errorf("no answer from the kernel: %w", os.ErrDeadlineExceeded)
		}
		if err != nil {
			return nil, err
		}
		messages, err := syscall.ParseNetlinkMessage(buf[:n])
		if err != nil {
			return nil, err
		}
		more, done, err := parseLinks(messages)
		links = append(links, more...)
		if errors.Is(err, netlink.ErrDumpInterrupted) {
			interrupted, err = err, nil
		}
		if done || err != nil {
			return links, cmp.Or(err, interrupted)
		}
	}
}

// parseLinks parses a part of a dump, and reports whether it is the last part.
func parseLinks(messages []syscall.NetlinkMessage) (links []netlink.Link, done bool, err error) {
	for _, m := range messages {
		if m.Header.Flags&unix.NLM_F_DUMP_INTR != 0 {
			err = netlink.ErrDumpInterrupted
		}
		switch m.Header.Type {
		case unix.NLMSG_DONE, unix.NLMSG_ERROR:
			if len(m.Data) >= 4 {
				if code := int32(binary.NativeEndian.Uint32(m.Data)); code != 0 {
					return nil, true, unix.Errno(-code)
				}
			}
			return links, true, err
		case unix.RTM_NEWLINK:
			link, bad := netlink.LinkDeserialize(nil, bytes.Clone(m.Data)) // the link refers to the data
			if bad != nil {
				return nil, true, bad
			}
			links = append(links, link)
		}
	}
	return links, false, err
}
