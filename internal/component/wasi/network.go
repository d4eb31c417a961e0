package wasi

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// Network opens the guest's connections and resolves its names. Its methods are called concurrently, and can block until
// ctx ends. Their errors should be an ErrorCode; the guest gets CodeUnknown for others.
type Network interface {
	// Connect opens a connected socket. The network is "tcp" or "udp".
	Connect(ctx context.Context, network string, to netip.AddrPort) (Socket, error)
	// Resolve returns the addresses of a name in ASCII.
	Resolve(ctx context.Context, name string) ([]netip.Addr, error)
}

// Socket is a connected socket that does not block.
type Socket interface {
	net.Conn
	syscall.Conn
}

// ErrorCode is a case of the enum error-code in wasi:sockets/network.
type ErrorCode int

// The cases, in the order of the WIT.
const (
	CodeUnknown ErrorCode = iota
	CodeAccessDenied
	CodeNotSupported
	CodeInvalidArgument
	CodeOutOfMemory
	CodeTimeout
	CodeConcurrencyConflict
	CodeNotInProgress
	CodeWouldBlock
	CodeInvalidState
	CodeNewSocketLimit
	CodeAddressNotBindable
	CodeAddressInUse
	CodeRemoteUnreachable
	CodeConnectionRefused
	CodeConnectionReset
	CodeConnectionAborted
	CodeDatagramTooLarge
	CodeNameUnresolvable
	CodeTemporaryResolverFailure
	CodePermanentResolverFailure
)

func (e ErrorCode) Error() string { return fmt.Sprintf("error-code %d of wasi:sockets", int(e)) }

// errnoCodes maps the errors of system calls to codes.
var errnoCodes = map[unix.Errno]ErrorCode{
	unix.EACCES: CodeAccessDenied, unix.EPERM: CodeAccessDenied, // EPERM comes from a firewall
	unix.ETIMEDOUT: CodeTimeout, unix.EPIPE: CodeConnectionAborted, unix.ECONNABORTED: CodeConnectionAborted,
	unix.ENETUNREACH: CodeRemoteUnreachable, unix.EHOSTUNREACH: CodeRemoteUnreachable, unix.ENETDOWN: CodeRemoteUnreachable,
	unix.ECONNREFUSED: CodeConnectionRefused, unix.ECONNRESET: CodeConnectionReset, unix.EMSGSIZE: CodeDatagramTooLarge,
	unix.EINVAL: CodeInvalidArgument, unix.ENOMEM: CodeOutOfMemory,
}

// networkCode returns the code of a socket's error.
func networkCode(err error) (code ErrorCode, known bool) {
	if code, ok := errors.AsType[ErrorCode](err); ok {
		return code, true
	}
	if errno, ok := errors.AsType[unix.Errno](err); ok {
		code, known = errnoCodes[errno]
	}
	return code, known
}

// socketFailed writes the error result of a function of wasi:sockets.
func (c *Call) socketFailed(err error) {
	code, _ := networkCode(err)
	c.Out = c.Out[:0]
	c.FailedWith(int(code))
}

// socketMethod makes a method of the resource R. If the given function returns an ErrorCode, the guest gets that; another
// error ends the guest's call.
func socketMethod[R any](do func(c *Call, r R) error) Func {
	return func(c *Call) error {
		r, err := Get[R](c.State, c.In.U32())
		if err != nil {
			return err
		}
		return c.codeOr(do(c, r))
	}
}

// codeOr writes an ErrorCode as the result, and returns other errors.
func (c *Call) codeOr(err error) error {
	if _, ok := errors.AsType[ErrorCode](err); !ok {
		return err
	}
	c.socketFailed(err)
	return nil
}

// errorOf returns the code of an error of a socket, so that the guest gets it.
func errorOf(err error) error {
	if err == nil {
		return nil
	}
	code, _ := networkCode(err)
	return code
}

// family is the enum ip-address-family.
type family int

const (
	ipv4 family = iota
	ipv6
)

// of reports whether an address belongs to the family. IPv4 addresses in the form of IPv6 belong to neither.
func (f family) of(addr netip.Addr) bool {
	if f == ipv4 {
		return addr.Is4()
	}
	return addr.Is6() && !addr.Is4In6()
}

// wildcard is the address of a socket that is bound, but has sent nothing.
func (f family) wildcard() netip.AddrPort {
	if f == ipv4 {
		return netip.AddrPortFrom(netip.IPv4Unspecified(), 0)
	}
	return netip.AddrPortFrom(netip.IPv6Unspecified(), 0)
}

// remote checks the address of a peer.
func (f family) remote(to netip.AddrPort) error {
	if !f.of(to.Addr()) || to.Addr().IsUnspecified() || to.Port() == 0 {
		return CodeInvalidArgument
	}
	return nil
}

// local checks the address that a guest binds a socket to. The kernel chooses the address and the port of a connection,
// so that the guest can ask for nothing else.
func (f family) local(addr netip.AddrPort) error {
	switch {
	case !f.of(addr.Addr()):
		return CodeInvalidArgument
	case addr != f.wildcard():
		return CodeAccessDenied
	}
	return nil
}

// readAddress reads an ip-socket-address. A scope-id is part of the address, so that no address with one is allowed.
func (c *Call) readAddress() netip.AddrPort {
	if c.In.Case(2) == 0 {
		port := c.In.U16()
		var addr [4]byte
		copy(addr[:], c.In.Raw(4))
		return netip.AddrPortFrom(netip.AddrFrom4(addr), port)
	}
	port := c.In.U16()
	c.In.U32() // flow-info, which Linux ignores unless a socket option asks for it
	var addr [16]byte
	for i := 0; i < len(addr); i += 2 {
		part := c.In.U16()
		addr[i], addr[i+1] = byte(part>>8), byte(part)
	}
	ip := netip.AddrFrom16(addr)
	if scope := c.In.U32(); scope != 0 {
		ip = ip.WithZone(fmt.Sprint(scope))
	}
	return netip.AddrPortFrom(ip, port)
}

// writeAddress appends an ip-socket-address.
func (c *Call) writeAddress(a netip.AddrPort) {
	addr := a.Addr().Unmap()
	c.Out = wit.AppendCase(c.Out, caseOf(addr))
	c.Out = wit.AppendU16(c.Out, a.Port())
	if addr.Is6() {
		c.Out = wit.AppendU32(c.Out, 0) // flow-info
	}
	c.writeParts(addr)
	if addr.Is6() {
		c.Out = wit.AppendU32(c.Out, 0) // scope-id
	}
}

// writeIP appends an ip-address.
func (c *Call) writeIP(addr netip.Addr) {
	c.Out = wit.AppendCase(c.Out, caseOf(addr))
	c.writeParts(addr)
}

func caseOf(addr netip.Addr) int {
	if addr.Is4() {
		return int(ipv4)
	}
	return int(ipv6)
}

// writeParts appends an ipv4-address or ipv6-address.
func (c *Call) writeParts(addr netip.Addr) {
	parts := addr.AsSlice()
	if addr.Is4() {
		c.Out = append(c.Out, parts...)
		return
	}
	for i := 0; i < len(parts); i += 2 {
		c.Out = wit.AppendU16(c.Out, uint16(parts[i])<<8|uint16(parts[i+1]))
	}
}

// addressOf converts an address of a Socket.
func addressOf(a net.Addr) netip.AddrPort {
	if with, ok := a.(interface{ AddrPort() netip.AddrPort }); ok {
		return with.AddrPort()
	}
	return netip.AddrPort{}
}

// networkResource is the resource "network". There is one network, which needs no data.
type networkResource struct{}

func instanceNetwork(c *Call) error {
	c.Own(networkResource{})
	return nil
}

// networkErrorCode returns the error-code of an error of a TCP stream, or none for other streams.
func networkErrorCode(c *Call) error {
	e, err := Get[*StreamError](c.State, c.In.U32())
	if err != nil {
		return err
	}
	code, known := networkCode(e.Cause)
	c.Out = wit.AppendOption(c.Out, known)
	if known {
		c.Out = wit.AppendCase(c.Out, int(code))
	}
	return nil
}

// Bytes that count for State.Hold.
const (
	socketBytes = 4 << 10    // a socket or a lookup
	peerBytes   = 8 << 10    // a remote address of a UDP socket
	streamBytes = 2 * window // a TCP connection
)

// attempt is a connection attempt, which runs in the background.
type attempt struct {
	cancel context.CancelFunc

	mu        sync.Mutex
	done      bool
	abandoned bool
	socket    Socket
	err       error
}

// attempt starts to connect. It wakes the guest at the end.
func (s *State) attempt(network string, to netip.AddrPort) *attempt {
	ctx, cancel := context.WithCancel(s.Alive())
	a := &attempt{cancel: cancel}
	go func() {
		defer s.Wake()
		defer cancel()
		var socket Socket
		err := s.Guard("connect a socket", func() (err error) {
			socket, err = s.options.Network.Connect(ctx, network, to)
			return err
		})
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.abandoned && err == nil {
			socket.Close()
			return
		}
		a.done, a.socket, a.err = true, socket, err
	}()
	return a
}

func (a *attempt) finished() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.done
}

// take returns the result of a finished attempt. The socket belongs to the caller.
func (a *attempt) take() (socket Socket, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	socket, a.socket = a.socket, nil
	return socket, errorOf(a.err)
}

// Close gives the attempt up, and closes the socket unless it has been taken. Close does nothing if a is nil.
func (a *attempt) Close() {
	if a == nil {
		return
	}
	a.cancel()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.abandoned = true
	if a.socket != nil {
		a.socket.Close()
	}
}

// onDescriptorOf calls a function with the descriptor of a socket, and returns the first error.
func onDescriptorOf(s Socket, do func(fd int) error) error {
	raw, err := s.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	if err := raw.Control(func(fd uintptr) { failed = do(int(fd)) }); err != nil {
		return err
	}
	return failed
}

// lingerTime bounds how long a connection that the guest has dropped stays open to send what the guest has written.
const lingerTime = 2 * time.Second
