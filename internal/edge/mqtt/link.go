package mqtt

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/packet"
)

const (
	// receiveMaximum bounds the unacknowledged messages with QoS 1 and 2 from the broker.
	receiveMaximum = 1024
	// windowMax bounds the unacknowledged messages to the broker with MQTT 5.0, and window4 bounds them with MQTT
	// 3.1.1, where a broker cannot announce its limit. window4 is mosquitto's default limit; above this limit,
	// mosquitto 2.0.11 loses messages with QoS 2.
	windowMax, window4 = 1024, 20
	// writeAhead is the number of buffered bytes above which senders wait.
	writeAhead = 1 << 20
)

// link is one connection, from CONNACK to its end.
type link struct {
	conn    net.Conn
	r       *bufio.Reader
	version byte // without the bridge bit
	limit   int64
	timeout time.Duration // of one write

	// From the CONNACK.
	resumed   bool
	window    int
	maxQoS    byte
	maxPacket uint32
	keepAlive time.Duration

	mu       sync.Mutex
	space    *sync.Cond
	buf      []byte
	err      error
	kick     chan struct{}
	done     chan struct{} // closed when the link has failed or was ended
	lastSent atomic.Int64  // unix nanoseconds
	lastRecv atomic.Int64
	since    time.Time
}

// dial connects and returns once the broker has accepted the client.
func dial(ctx context.Context, c Config) (*link, error) {
	ctx, cancel := context.WithTimeout(ctx, c.ConnectTimeout)
	defer cancel()
	address, secure, err := c.address()
	if err != nil {
		return nil, err
	}
	socket, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("mqtt: broker %s: %w", c.URL, err)
	}
	stop := context.AfterFunc(ctx, func() { socket.Close() })
	defer stop()
	conn := quickAck(socket)
	if secure {
		host, _, _ := net.SplitHostPort(address)
		conf, err := c.TLS.config(host)
		if err != nil {
			socket.Close()
			return nil, err
		}
		conn = tls.Client(conn, conf)
	}
	l, err := handshake(conn, c)
	if err != nil {
		socket.Close()
		return nil, fmt.Errorf("mqtt: broker %s: %w", c.URL, errors.Join(err, ctx.Err()))
	}
	return l, nil
}

// handshake sends CONNECT and reads CONNACK.
func handshake(conn net.Conn, c Config) (*link, error) {
	if _, err := conn.Write(packet.Append(nil, connectPacket(c), byte(c.Protocol))); err != nil {
		return nil, err
	}
	l := &link{
		conn: conn, r: bufio.NewReaderSize(conn, 64<<10), version: byte(c.Protocol), limit: c.MaxPacket, timeout: c.WriteTimeout,
		window: window4, maxQoS: 2, keepAlive: c.KeepAlive, since: time.Now(),
		kick: make(chan struct{}, 1), done: make(chan struct{}),
	}
	l.space = sync.NewCond(&l.mu)
	p, err := readPacket(l.r, l.version, l.limit)
	if err != nil {
		return nil, fmt.Errorf("no answer to CONNECT: %w", err)
	}
	answer, ok := p.(*packet.Connack)
	switch {
	case !ok:
		return nil, fmt.Errorf("answered CONNECT with another packet, %T: %w", p, errdefs.ErrFailedPrecondition)
	case answer.Code != packet.Success:
		return nil, fmt.Errorf("refused %q as user %q: %s: %w", c.ClientID, c.Username, refusal(l.version, answer), errdefs.ErrPermissionDenied)
	}
	l.accepted(answer)
	return l, nil
}

// accepted sets the link's limits from the CONNACK (MQTT 5.0 §3.2.2.3).
func (l *link) accepted(p *packet.Connack) {
	l.resumed = p.SessionPresent
	now := time.Now().UnixNano()
	l.lastSent.Store(now)
	l.lastRecv.Store(now)
	if l.version < 5 {
		return
	}
	l.window = int(min(p.Properties.NumberOr(packet.ReceiveMaximum, windowMax), windowMax))
	l.maxQoS = byte(p.Properties.NumberOr(packet.MaximumQoS, 2))
	if p.Properties.Has(packet.ServerKeepAlive) {
		l.keepAlive = time.Duration(p.Properties.Number(packet.ServerKeepAlive)) * time.Second
	}
	l.maxPacket = p.Properties.Number(packet.MaximumPacketSize)
}

// refusal returns the reason in a CONNACK as text (MQTT 3.1.1 §3.2.2.3, MQTT 5.0 §3.2.2.2).
func refusal(version byte, p *packet.Connack) string {
	if version >= 5 {
		return strings.TrimRight(fmt.Sprintf("%v: %s", p.Code, p.Properties.Text(packet.ReasonString)), ": ")
	}
	names := []string{1: "protocol version not accepted", 2: "client identifier not accepted", 3: "server unavailable",
		4: "bad user name or password", 5: "not authorized"}
	if int(p.Code) < len(names) {
		return names[p.Code]
	}
	return fmt.Sprintf("return code %d", byte(p.Code))
}

// send appends a packet to the buffer, which write sends. It blocks only while the buffer has more than writeAhead
// bytes.
func (l *link) send(p packet.Packet) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.err == nil && len(l.buf) > writeAhead {
		l.space.Wait()
	}
	if l.err != nil {
		return l.err
	}
	l.buf = packet.Append(l.buf, p, l.version)
	select {
	case l.kick <- struct{}{}:
	default:
	}
	return nil
}

// write writes the buffer to the socket whenever send has added packets. Under load, one write sends many packets.
func (l *link) write() {
	var reuse []byte
	for {
		select {
		case <-l.kick:
		case <-l.done:
			return
		}
		l.mu.Lock()
		full := l.buf
		l.buf = reuse
		l.space.Broadcast()
		l.mu.Unlock()
		if len(full) > 0 {
			_ = l.conn.SetWriteDeadline(time.Now().Add(l.timeout)) // if the connection is closed, Write fails
			if _, err := l.conn.Write(full); err != nil {
				l.fail(fmt.Errorf("mqtt: write to the broker: %w", err))
				return
			}
			l.lastSent.Store(time.Now().UnixNano())
		}
		if reuse = full[:0]; cap(full) > 2*writeAhead { // free the memory of a large message
			reuse = nil
		}
	}
}

// read passes every packet to handle, until the connection ends.
func (l *link) read(handle func(packet.Packet) error) {
	for {
		p, err := readPacket(l.r, l.version, l.limit)
		if err == nil {
			l.lastRecv.Store(time.Now().UnixNano())
			err = handle(p)
		}
		if err != nil {
			l.fail(err)
			return
		}
	}
}

// ping keeps the connection alive, and ends it when the broker is silent for twice the keep-alive.
func (l *link) ping() {
	if l.keepAlive <= 0 {
		return
	}
	tick := time.NewTicker(l.keepAlive / 4) // so a ping is sent after 1/2 to 3/4 of the keep-alive
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-l.done:
			return
		}
		now := time.Now()
		silent := now.Sub(time.Unix(0, l.lastRecv.Load()))
		if silent > 2*l.keepAlive {
			l.fail(fmt.Errorf("mqtt: the broker has been silent for %s: %w", silent.Round(time.Millisecond), errdefs.ErrUnavailable))
			return
		}
		if quiet := now.Sub(time.Unix(0, l.lastSent.Load())); max(silent, quiet) >= l.keepAlive/2 {
			// Ignore an error from send, which means that the link has ended.
			_ = l.send(&packet.Ping{Type: packet.PINGREQ})
		}
	}
}

// fail ends the link. Later errors are ignored.
func (l *link) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return
	}
	l.err = err
	close(l.done)
	l.conn.Close()
	l.space.Broadcast()
}

// disconnect ends the link. It first sends a DISCONNECT, so that the broker does not publish the will.
func (l *link) disconnect() {
	if l.send(&packet.End{Type: packet.DISCONNECT}) == nil {
		// The broker then closes the connection, and the reader ends the link.
		select {
		case <-l.done:
		case <-time.After(2 * time.Second):
		}
	}
	l.fail(errClosed)
}

// cause returns the error that has ended the link.
func (l *link) cause() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}
