package wasi

import (
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wit"
)

const (
	// maxPeers bounds the remote addresses of a UDP socket, since each has a socket of its own in the kernel: whether the
	// guest may send to an address is decided when its socket is opened.
	maxPeers = 32
	// maxDatagrams bounds the datagrams that one call sends or receives.
	maxDatagrams = 64
	// maxPayload is the size of the largest payload of a UDP datagram over IPv4 (RFC 768, RFC 791), in bytes.
	maxPayload = 65507
)

// udpSocket is the resource udp-socket.
type udpSocket struct {
	state   *State
	family  family
	phase   phase // phaseNew, phaseBinding or phaseBound
	options socketOptions
	flow    *flow // of the most recent streams, or nil
}

// flow is what a pair of datagram streams shares. Its sockets are connected, one for each peer.
type flow struct {
	socket    *udpSocket
	remote    netip.AddrPort // zero if each datagram names its peer
	peers     []*peer
	first     int // the peer that receive asks first
	connect   *attempt
	to        netip.AddrPort // that connect connects to
	permitted uint64         // datagrams that the guest may send, see check-send
	users     int            // streams
	closed    bool
}

// peer is a remote address of a flow.
type peer struct {
	Socket
	addr    netip.AddrPort
	waiting atomic.Bool // see await
}

// incoming and outgoing are the resources incoming-datagram-stream and outgoing-datagram-stream.
type (
	incoming struct{ *flow }
	outgoing struct{ *flow }
)

func createUDP(c *Call) error {
	f, err := c.newSocket()
	if err != nil {
		return c.codeOr(err)
	}
	c.OK()
	c.Own(&udpSocket{state: c.State, family: f, options: socketOptions{}})
	return nil
}

// Close is called when the guest drops the socket.
func (s *udpSocket) Close() error {
	s.state.Hold(-socketBytes)
	s.flow.end()
	return nil
}

func (s *udpSocket) settings() (family, socketOptions) { return s.family, s.options }

func (s *udpSocket) sockets() []Socket {
	if s.flow == nil {
		return nil
	}
	var all []Socket
	for _, p := range s.flow.peers {
		all = append(all, p.Socket)
	}
	return all
}

// openStreams makes streams, with one peer or with a peer for each datagram. Earlier streams of the socket end.
func (s *udpSocket) openStreams(c *Call) error {
	f := &flow{socket: s, users: 2}
	if c.In.Option() {
		f.remote = c.readAddress()
	}
	if s.phase != phaseBound {
		return s.phase.busy()
	}
	s.flow.end()
	s.flow = nil
	if f.remote.IsValid() {
		if err := f.connectNow(c); err != nil {
			f.end()
			return err
		}
	}
	s.flow = f
	c.OK()
	c.Own(incoming{f})
	c.Own(outgoing{f})
	return nil
}

// connectNow connects the flow to its only peer. The guest's thread waits for the Network, which sends no packet for that.
func (f *flow) connectNow(c *Call) error {
	if err := f.begin(f.remote); err != nil {
		return err
	}
	if err := c.wait(c, When(f.connect.finished)); err != nil {
		return err
	}
	return f.adopt()
}

// Close is called when the guest drops a stream.
func (f *flow) Close() error {
	if f.users--; f.users == 0 {
		f.end()
	}
	return nil
}

// end closes the sockets. It does nothing if the flow is nil or has ended.
func (f *flow) end() {
	if f == nil || f.closed {
		return
	}
	f.closed = true
	if f.connect != nil {
		f.connect.Close()
		f.socket.state.Hold(-peerBytes)
	}
	for _, p := range f.peers {
		p.Close()
		f.socket.state.Hold(-peerBytes)
	}
	f.peers = nil
	f.socket.state.Wake()
}

// begin starts to connect to a peer.
func (f *flow) begin(to netip.AddrPort) error {
	switch {
	case f.socket.family.remote(to) != nil:
		return CodeInvalidArgument
	case len(f.peers) >= maxPeers:
		return CodeNewSocketLimit
	case !f.socket.state.Hold(peerBytes):
		return CodeOutOfMemory
	}
	f.connect, f.to = f.socket.state.attempt("udp", to), to
	return nil
}

// adopt adds the peer of a finished attempt, and returns the error of the attempt.
func (f *flow) adopt() error {
	socket, err := f.connect.take()
	f.connect = nil
	if err == nil {
		if err = errorOf(f.socket.options.apply(socket)); err != nil {
			socket.Close()
		}
	}
	if err != nil {
		f.socket.state.Hold(-peerBytes)
		return err
	}
	f.peers = append(f.peers, &peer{Socket: socket, addr: f.to})
	return nil
}

// idle reports whether the flow is not connecting to a peer.
func (f *flow) idle() bool { return f.connect == nil || f.connect.finished() }

// peer returns the peer with an address. If there is none yet, peer starts to connect and returns nil.
func (f *flow) peer(to netip.AddrPort) (*peer, error) {
	if f.connect != nil && f.connect.finished() {
		wanted := f.to == to
		if err := f.adopt(); err != nil && wanted {
			return nil, err
		}
	}
	if i := slices.IndexFunc(f.peers, func(p *peer) bool { return p.addr == to }); i >= 0 {
		return f.peers[i], nil
	}
	if f.connect != nil || f.closed {
		return nil, nil
	}
	return nil, f.begin(to)
}

// send sends a datagram. If the buffer of the socket is full, the datagram is lost like on any other part of its way.
func (p *peer) send(data []byte) error {
	err := onDescriptorOf(p.Socket, func(fd int) error {
		_, err := unix.Write(fd, data)
		return err
	})
	if err == unix.EAGAIN || err == unix.ENOBUFS {
		return nil
	}
	return errorOf(err)
}

// receive returns the next datagram in buf, or ok false if there is none.
func (p *peer) receive(buf []byte) (n int, ok bool, err error) {
	err = onDescriptorOf(p.Socket, func(fd int) (err error) {
		n, _, err = unix.Recvfrom(fd, buf, unix.MSG_DONTWAIT)
		return err
	})
	if err == unix.EAGAIN {
		return 0, false, nil
	}
	return n, err == nil, errorOf(err)
}

// readable reports whether receive would return a datagram or an error.
func readable(fd int) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return n > 0 && err == nil
}

// await reports whether the peer is readable. If it is not, await wakes the guest as soon as it is.
func (p *peer) await(wake func()) bool {
	ready := false
	if err := onDescriptorOf(p.Socket, func(fd int) error { ready = readable(fd); return nil }); err != nil || ready {
		return true
	}
	if raw, err := p.SyscallConn(); err == nil && p.waiting.CompareAndSwap(false, true) {
		go func() {
			_ = raw.Read(func(fd uintptr) bool { return readable(int(fd)) }) // fails when the socket is closed
			p.waiting.Store(false)
			wake()
		}()
	}
	return false
}

// ready reports whether a receive would return something. If not, the guest is woken later.
func (f *flow) ready() bool {
	ready := f.closed
	for _, p := range f.peers {
		ready = p.await(f.socket.state.Wake) || ready
	}
	return ready
}

// receive returns datagrams of all peers, each peer in its turn.
func (in incoming) receive(c *Call) error {
	most := min(c.In.U64(), maxDatagrams)
	if in.closed {
		return CodeInvalidState
	}
	buf := windows.Get().(*[window]byte)
	defer windows.Put(buf)
	c.OK()
	at := len(c.Out)
	c.Out = wit.AppendLen(c.Out, 0)
	var received uint64
	for empty := 0; received < most && empty < len(in.peers) && len(c.Out) < maxRead; {
		p := in.peers[in.first%len(in.peers)]
		in.first++
		n, ok, err := p.receive(buf[:])
		switch {
		case err != nil && in.remote.IsValid() && received == 0:
			return err
		case !ok: // or an error of one of several peers, which the next datagram to it would meet again
			empty++
			continue
		}
		empty = 0
		received++
		c.Out = wit.AppendBytes(c.Out, buf[:n])
		c.writeAddress(p.addr)
	}
	binary.LittleEndian.PutUint32(c.Out[at:], uint32(received))
	if received > 0 && c.Renew != nil {
		c.Renew()
	}
	return nil
}

// checkSend returns how many datagrams the guest may send: none while the flow connects to a peer.
func (out outgoing) checkSend(c *Call) error {
	if out.closed {
		return CodeInvalidState
	}
	out.permitted = 0
	if out.idle() {
		out.permitted = maxDatagrams
	}
	c.OK()
	c.Out = wit.AppendU64(c.Out, out.permitted)
	return nil
}

// send sends datagrams up to the first one whose peer has no socket yet, or that fails. If that is the very first, the
// guest gets the error, or the number 0; then it waits until check-send returns more, and sends it again.
func (out outgoing) send(c *Call) error {
	n := uint64(c.In.Len())
	if out.closed {
		return CodeInvalidState
	}
	if n > out.permitted {
		return fmt.Errorf("%d datagrams were sent where %d were allowed", n, out.permitted)
	}
	out.permitted -= n
	var sent uint64
	for ; sent < n; sent++ {
		ok, err := out.sendOne(c)
		if err != nil && sent == 0 {
			return err
		}
		if err != nil || !ok {
			break
		}
	}
	c.OK()
	c.Out = wit.AppendU64(c.Out, sent)
	return nil
}

// sendOne reads and sends a datagram. It returns false if its peer has no socket yet.
func (out outgoing) sendOne(c *Call) (bool, error) {
	data := c.In.Bytes()
	to := out.remote
	if c.In.Option() {
		to = c.readAddress()
	}
	switch {
	case !to.IsValid(), out.remote.IsValid() && to != out.remote:
		return false, CodeInvalidArgument
	case len(data) > maxPayload:
		return false, CodeDatagramTooLarge
	}
	p, err := out.peer(to)
	if p == nil || err != nil {
		return false, err
	}
	return true, p.send(data)
}

func (s *udpSocket) localAddress() (netip.AddrPort, error) {
	switch {
	case s.phase != phaseBound:
		return netip.AddrPort{}, s.phase.busy()
	case s.flow != nil && s.flow.remote.IsValid() && len(s.flow.peers) > 0:
		return addressOf(s.flow.peers[0].LocalAddr()), nil
	}
	return s.family.wildcard(), nil
}

func (s *udpSocket) remoteAddress() (netip.AddrPort, error) {
	if s.flow == nil || !s.flow.remote.IsValid() {
		return netip.AddrPort{}, CodeInvalidState
	}
	return s.flow.remote, nil
}

var udpFuncs = func() map[string]Func {
	all := map[string]Func{
		"[method]udp-socket.start-bind":     socketMethod(func(c *Call, s *udpSocket) error { return s.phase.startBind(c, s.family) }),
		"[method]udp-socket.finish-bind":    socketMethod(func(c *Call, s *udpSocket) error { return s.phase.finishBind(c) }),
		"[method]udp-socket.stream":         socketMethod(func(c *Call, s *udpSocket) error { return s.openStreams(c) }),
		"[method]udp-socket.local-address":  addressMethod((*udpSocket).localAddress),
		"[method]udp-socket.remote-address": addressMethod((*udpSocket).remoteAddress),
		"[method]udp-socket.address-family": socketMethod(func(c *Call, s *udpSocket) error {
			c.Out = wit.AppendCase(c.Out, int(s.family))
			return nil
		}),
		"[method]udp-socket.subscribe": socketMethod(func(c *Call, _ *udpSocket) error {
			c.Own(When(func() bool { return true })) // no operation of the socket waits
			return nil
		}),
		"[method]incoming-datagram-stream.receive": socketMethod(func(c *Call, in incoming) error { return in.receive(c) }),
		"[method]incoming-datagram-stream.subscribe": socketMethod(func(c *Call, in incoming) error {
			c.Own(When(in.ready))
			return nil
		}),
		"[method]outgoing-datagram-stream.check-send": socketMethod(func(c *Call, out outgoing) error { return out.checkSend(c) }),
		"[method]outgoing-datagram-stream.send":       socketMethod(func(c *Call, out outgoing) error { return out.send(c) }),
		"[method]outgoing-datagram-stream.subscribe": socketMethod(func(c *Call, out outgoing) error {
			c.Own(When(func() bool { return out.closed || out.idle() }))
			return nil
		}),
	}
	for _, o := range []struct {
		name, setter string
		value        value
		of           func(family) socketOption
	}{
		{"unicast-hop-limit", "set-unicast-hop-limit", u8Value, family.hopLimit},
		{"receive-buffer-size", "set-receive-buffer-size", u64Value, always(optReceiveBuffer)},
		{"send-buffer-size", "set-send-buffer-size", u64Value, always(optSendBuffer)},
	} {
		maps.Copy(all, optionFuncs[*udpSocket]("udp-socket", o.name, o.setter, o.value, o.of))
	}
	return all
}()
