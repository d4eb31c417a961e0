package wasi

import (
	"io"
	"maps"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// phase is the state of a socket:
//
//	phaseNew ──start-bind──► phaseBinding ──finish-bind──► phaseBound      (a TCP socket need not be bound)
//	phaseNew, phaseBound ──start-connect──► phaseConnecting ──finish-connect──► phaseConnected, or phaseClosed on failure
type phase int

const (
	phaseNew phase = iota
	phaseBinding
	phaseBound
	phaseConnecting
	phaseConnected
	phaseClosed
)

// busy returns the error of an operation in a phase that does not allow it.
func (p phase) busy() error {
	if p == phaseBinding || p == phaseConnecting {
		return CodeConcurrencyConflict
	}
	return CodeInvalidState
}

// startBind and finishBind implement bind for both kinds of sockets. Only the kernel chooses addresses and ports, so they
// have no effect besides the phase.
func (p *phase) startBind(c *Call, f family) error {
	c.In.U32() // the network
	addr := c.readAddress()
	if *p != phaseNew {
		return p.busy()
	}
	if err := f.local(addr); err != nil {
		return err
	}
	*p = phaseBinding
	c.OK()
	return nil
}

func (p *phase) finishBind(c *Call) error {
	if *p != phaseBinding {
		return CodeNotInProgress
	}
	*p = phaseBound
	c.OK()
	return nil
}

// tcpSocket is the resource tcp-socket.
type tcpSocket struct {
	state   *State
	family  family
	phase   phase
	options socketOptions
	attempt *attempt    // in phaseConnecting
	conn    *connection // in phaseConnected
}

func createTCP(c *Call) error {
	f, err := c.newSocket()
	if err != nil {
		return c.codeOr(err)
	}
	c.OK()
	c.Own(&tcpSocket{state: c.State, family: f, options: socketOptions{}})
	return nil
}

// newSocket reads the family of a new socket and counts it.
func (c *Call) newSocket() (family, error) {
	f := family(c.In.Case(2))
	switch {
	case c.options.Network == nil:
		return f, CodeAccessDenied
	case !c.Hold(socketBytes):
		return f, CodeOutOfMemory
	}
	return f, nil
}

// Close is called when the guest drops the socket.
func (s *tcpSocket) Close() error {
	s.state.Hold(-socketBytes)
	switch s.phase {
	case phaseConnecting:
		s.attempt.Close()
		s.state.Hold(-streamBytes)
	case phaseConnected:
		s.conn.release()
	}
	return nil
}

func (s *tcpSocket) settings() (family, socketOptions) { return s.family, s.options }

func (s *tcpSocket) sockets() []Socket {
	if s.conn == nil {
		return nil
	}
	return []Socket{s.conn.Socket}
}

func (s *tcpSocket) startConnect(c *Call) error {
	c.In.U32() // the network
	to := c.readAddress()
	if s.phase != phaseNew && s.phase != phaseBound {
		return s.phase.busy()
	}
	if err := s.family.remote(to); err != nil {
		return err
	}
	if !s.state.Hold(streamBytes) {
		return CodeOutOfMemory
	}
	s.phase, s.attempt = phaseConnecting, s.state.attempt("tcp", to)
	c.OK()
	return nil
}

func (s *tcpSocket) finishConnect(c *Call) error {
	switch {
	case s.phase != phaseConnecting:
		return CodeNotInProgress
	case !s.attempt.finished():
		return CodeWouldBlock
	}
	socket, err := s.attempt.take()
	if err == nil {
		if err = errorOf(s.options.apply(socket)); err != nil {
			socket.Close()
		}
	}
	s.attempt = nil
	if err != nil {
		s.phase = phaseClosed
		s.state.Hold(-streamBytes)
		return err
	}
	s.phase, s.conn = phaseConnected, newConnection(s.state, socket)
	c.OK()
	c.Own(&InputStream{Input: s.conn.in.Background(), release: s.conn.release})
	c.Own(&OutputStream{Output: &tcpOutput{s.conn.out.Background(), s.conn}, release: s.conn.release})
	return nil
}

func (s *tcpSocket) localAddress() (netip.AddrPort, error) {
	switch s.phase {
	case phaseBound:
		return s.family.wildcard(), nil
	case phaseConnected:
		return addressOf(s.conn.LocalAddr()), nil
	}
	return netip.AddrPort{}, s.phase.busy()
}

func (s *tcpSocket) remoteAddress() (netip.AddrPort, error) {
	if s.phase != phaseConnected {
		return netip.AddrPort{}, s.phase.busy()
	}
	return addressOf(s.conn.RemoteAddr()), nil
}

// addressMethod makes a method that returns an ip-socket-address.
func addressMethod[S any](of func(s S) (netip.AddrPort, error)) Func {
	return socketMethod(func(c *Call, s S) error {
		addr, err := of(s)
		if err != nil {
			return err
		}
		c.OK()
		c.writeAddress(addr)
		return nil
	})
}

// listen refuses to listen: a pod's sockets for others are those of its ports.
func (s *tcpSocket) listen(*Call) error {
	if s.phase == phaseBound {
		return CodeAccessDenied
	}
	return s.phase.busy()
}

// Cases of shutdown-type.
const (
	shutdownReceive = iota
	shutdownSend
	shutdownBoth
)

func (s *tcpSocket) shutdown(c *Call) error {
	how := c.In.Case(3)
	if s.phase != phaseConnected {
		return s.phase.busy()
	}
	if how != shutdownSend {
		_ = s.conn.shutdown(unix.SHUT_RD) // fails if the peer has reset the connection
	}
	if how != shutdownReceive {
		s.conn.endOutput()
	}
	c.OK()
	return nil
}

// connection is a TCP connection. The socket and its two streams share it.
type connection struct {
	Socket
	state *State
	in    *Reader
	out   *Writer
	users int
	ended bool // by endOutput
}

func newConnection(s *State, socket Socket) *connection {
	return &connection{Socket: socket, state: s, in: NewReader(socket, s.Wake), out: NewWriter(socket, nil, s.Wake), users: 3}
}

// release is called when the guest drops the socket or a stream. The last call closes the connection in the background,
// when the bytes that the guest has written have been sent, or after lingerTime.
func (n *connection) release() {
	if n.users--; n.users > 0 {
		return
	}
	n.state.Hold(-streamBytes)
	_ = n.SetWriteDeadline(time.Now().Add(lingerTime))
	go func() {
		n.in.Release(func() { _ = n.SetReadDeadline(time.Unix(1, 0)) })
		_ = n.out.Close() // the guest cannot learn of an error any more
		n.Close()
	}()
}

func (n *connection) shutdown(how int) error {
	return onDescriptorOf(n.Socket, func(fd int) error { return unix.Shutdown(fd, how) })
}

// endOutput tells the peer that no more bytes follow, after the bytes that the guest has written.
func (n *connection) endOutput() {
	if n.ended {
		return
	}
	n.ended = true
	go func() {
		_ = n.out.Close() // an error has ended the connection
		_ = n.shutdown(unix.SHUT_WR)
		n.state.Wake()
	}()
}

// tcpOutput is the Output of a connection.
type tcpOutput struct {
	Output
	conn *connection
}

// Room implements Output.
func (o *tcpOutput) Room() (int, error) {
	if o.conn.ended {
		return 0, io.ErrClosedPipe
	}
	return o.Output.Room()
}

// Write implements Output. Without a Flush, bytes are sent immediately, too, because a guest that has written a request can
// wait for the response.
func (o *tcpOutput) Write(p []byte) error {
	err := o.Output.Write(p)
	o.Output.Flush()
	return err
}

// Through implements Output.
func (o *tcpOutput) Through(p []byte) (bool, error) {
	if o.conn.ended {
		return true, io.ErrClosedPipe
	}
	return o.Output.Through(p)
}

var tcpFuncs = func() map[string]Func {
	all := map[string]Func{
		"[method]tcp-socket.start-bind":              socketMethod(func(c *Call, s *tcpSocket) error { return s.phase.startBind(c, s.family) }),
		"[method]tcp-socket.finish-bind":             socketMethod(func(c *Call, s *tcpSocket) error { return s.phase.finishBind(c) }),
		"[method]tcp-socket.start-connect":           socketMethod(func(c *Call, s *tcpSocket) error { return s.startConnect(c) }),
		"[method]tcp-socket.finish-connect":          socketMethod(func(c *Call, s *tcpSocket) error { return s.finishConnect(c) }),
		"[method]tcp-socket.start-listen":            socketMethod(func(c *Call, s *tcpSocket) error { return s.listen(c) }),
		"[method]tcp-socket.finish-listen":           socketMethod(func(*Call, *tcpSocket) error { return CodeNotInProgress }),
		"[method]tcp-socket.accept":                  socketMethod(func(*Call, *tcpSocket) error { return CodeInvalidState }),
		"[method]tcp-socket.set-listen-backlog-size": socketMethod(func(*Call, *tcpSocket) error { return CodeNotSupported }),
		"[method]tcp-socket.local-address":           addressMethod((*tcpSocket).localAddress),
		"[method]tcp-socket.remote-address":          addressMethod((*tcpSocket).remoteAddress),
		"[method]tcp-socket.shutdown":                socketMethod(func(c *Call, s *tcpSocket) error { return s.shutdown(c) }),
		"[method]tcp-socket.is-listening": socketMethod(func(c *Call, _ *tcpSocket) error {
			c.Out = wit.AppendBool(c.Out, false)
			return nil
		}),
		"[method]tcp-socket.address-family": socketMethod(func(c *Call, s *tcpSocket) error {
			c.Out = wit.AppendCase(c.Out, int(s.family))
			return nil
		}),
		"[method]tcp-socket.subscribe": socketMethod(func(c *Call, s *tcpSocket) error {
			c.Own(When(func() bool { return s.attempt == nil || s.attempt.finished() }))
			return nil
		}),
	}
	for _, o := range []struct {
		name, setter string
		value        value
		of           func(family) socketOption
	}{
		{"keep-alive-enabled", "set-keep-alive-enabled", boolValue, always(optKeepAlive)},
		{"keep-alive-idle-time", "set-keep-alive-idle-time", u64Value, always(optKeepAliveIdle)},
		{"keep-alive-interval", "set-keep-alive-interval", u64Value, always(optKeepAliveInterval)},
		{"keep-alive-count", "set-keep-alive-count", u32Value, always(optKeepAliveCount)},
		{"hop-limit", "set-hop-limit", u8Value, family.hopLimit},
		{"receive-buffer-size", "set-receive-buffer-size", u64Value, always(optReceiveBuffer)},
		{"send-buffer-size", "set-send-buffer-size", u64Value, always(optSendBuffer)},
	} {
		maps.Copy(all, optionFuncs[*tcpSocket]("tcp-socket", o.name, o.setter, o.value, o.of))
	}
	return all
}()
