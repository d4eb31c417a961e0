package network

import (
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// protocol returns the protocol in lower case.
func (p PortMapping) protocol() string { return strings.ToLower(cmp.Or(p.Protocol, "tcp")) }

// hostAddr returns the node's address to listen on; an unspecified address means all.
func (p PortMapping) hostAddr() netip.Addr {
	addr, err := netip.ParseAddr(p.HostIP)
	if err != nil {
		return netip.IPv6Unspecified()
	}
	return addr.Unmap()
}

// HostPortString names the host port for people.
func (p PortMapping) HostPortString() string {
	if p.hostAddr().IsUnspecified() {
		return fmt.Sprintf("%d/%s", p.HostPort, p.protocol())
	}
	return fmt.Sprintf("%s/%s", netip.AddrPortFrom(p.hostAddr(), uint16(p.HostPort)), p.protocol())
}

// Conflicts reports whether two pods cannot have these host ports at the same time.
func (p PortMapping) Conflicts(other PortMapping) bool {
	return p.HostPort == other.HostPort && p.protocol() == other.protocol() && overlap(p.hostAddr(), other.hostAddr())
}

func overlap(a, b netip.Addr) bool { return a == b || a.IsUnspecified() || b.IsUnspecified() }

// HostProcess names the process of the node that listens on the host port, or returns "" if there is none. If the pod is
// on the host network, listeners on other addresses than all do not count, because the pod may listen beside them. SCTP
// is not looked at, because a socket would load the kernel's module.
func (p PortMapping) HostProcess(hostNetwork bool) string {
	if !p.inUse() {
		return ""
	}
	// The socket in use can be a client's, which port mappings leave alone.
	for _, file := range []string{"/proc/net/" + p.protocol(), "/proc/net/" + p.protocol() + "6"} {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // no IPv6
		}
		for line := range strings.Lines(string(text)) {
			addr, inode := p.listener(line)
			if !addr.IsValid() || !overlap(p.hostAddr(), addr) {
				continue
			}
			if hostNetwork && !addr.IsUnspecified() && addr != p.hostAddr() {
				continue
			}
			return owner(inode)
		}
	}
	return ""
}

// inUse reports whether a socket of the node has the host port. It binds one to the port, and does not listen.
func (p PortMapping) inUse() bool {
	kind := map[string]int{"tcp": unix.SOCK_STREAM, "udp": unix.SOCK_DGRAM}[p.protocol()]
	if kind == 0 {
		return false
	}
	addr := p.hostAddr()
	if addr.Is4() {
		return bindFails(unix.AF_INET, kind, &unix.SockaddrInet4{Port: int(p.HostPort), Addr: addr.As4()})
	}
	return bindFails(unix.AF_INET6, kind, &unix.SockaddrInet6{Port: int(p.HostPort), Addr: addr.As16()}) ||
		addr.IsUnspecified() && bindFails(unix.AF_INET, kind, &unix.SockaddrInet4{Port: int(p.HostPort)}) // the node may have no IPv6
}

// bindFails reports whether another socket stands in the way of a socket with the given address. Connections of TCP that
// have ended do not.
func bindFails(family, kind int, at unix.Sockaddr) bool {
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false // the node lacks the family
	}
	defer unix.Close(fd)
	if kind == unix.SOCK_STREAM { // sockets of UDP with this option share the port
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	}
	return err == nil && errors.Is(unix.Bind(fd, at), unix.EADDRINUSE)
}

// listener parses a line of a file in /proc/net. It returns the zero address unless the socket listens on the host port:
// a listening socket of TCP, or an unconnected one of UDP.
func (p PortMapping) listener(line string) (addr netip.Addr, inode string) {
	const tcpListens, udpUnconnected = "0A", "07"
	f := strings.Fields(line)
	if len(f) < 10 || f[3] != map[string]string{"tcp": tcpListens, "udp": udpUnconnected}[p.protocol()] {
		return addr, ""
	}
	host, port, _ := strings.Cut(f[1], ":")
	raw, err := hex.DecodeString(host)
	if n, portErr := strconv.ParseUint(port, 16, 16); err != nil || portErr != nil || int32(n) != p.HostPort {
		return addr, ""
	}
	for i := 0; i+4 <= len(raw); i += 4 { // words in the machine's byte order
		binary.NativeEndian.PutUint32(raw[i:], binary.BigEndian.Uint32(raw[i:]))
	}
	addr, _ = netip.AddrFromSlice(raw)
	return addr.Unmap(), f[9]
}

// owner names the process that has the socket with the given inode.
func owner(inode string) string {
	fds, _ := filepath.Glob("/proc/[0-9]*/fd/*")
	for _, fd := range fds {
		if target, err := os.Readlink(fd); err != nil || target != "socket:["+inode+"]" {
			continue
		}
		dir := filepath.Dir(filepath.Dir(fd))
		if comm, err := os.ReadFile(filepath.Join(dir, "comm")); err == nil {
			return fmt.Sprintf("process %s (PID %s)", strings.TrimSpace(string(comm)), filepath.Base(dir))
		}
	}
	return "a process that /proc does not show"
}
