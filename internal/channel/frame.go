package channel

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
)

// Control messages of a runtime to its manager that are about channels; the others are edge/wire's.
const (
	OpenChannel  = 3 // Open
	CloseChannel = 4 // ParseClose
)

// hello says that all that follows it in its direction has the wide header (Conn.Widen). No public peer has this type.
const (
	hello     = 0x7f
	helloWide = "tripod-wide-1"
)

// Limits of the protocol.
const (
	MaxModules  = 128 // of one runtime, with the narrow header
	MaxChannels = 256 // of one module, with the narrow header

	MaxModulesWide  = 1 << 15
	MaxChannelsWide = 1 << 16

	DefaultMaxFrame = 16 << 20 // bytes of a payload
)

const (
	narrowSize = 6
	wideSize   = 8

	grow    = 256 << 10 // a payload's buffer grows by at most so many bytes ahead of what has come
	oneCopy = 64 << 10  // payloads up to here go out in one piece with their header
)

// Header is the address of a message.
type Header struct {
	Control bool
	Module  int // index of the module in its runtime
	Arg     int // type of a control message, else the number of the channel
}

// Message is one frame.
type Message struct {
	Header
	Payload []byte
}

// Append appends the message as a frame with the narrow header, or the wide one; an index that the header has no room for is
// ErrInvalidArgument.
func (m Message) Append(b []byte, wide bool) ([]byte, error) {
	b, err := m.appendHeader(b, wide)
	if err != nil {
		return nil, err
	}
	return append(b, m.Payload...), nil
}

func (m Message) appendHeader(b []byte, wide bool) ([]byte, error) {
	modules, args := MaxModules, MaxChannels
	if wide {
		modules, args = MaxModulesWide, MaxChannelsWide
	}
	switch {
	case m.Module < 0 || m.Module >= modules:
		return nil, fmt.Errorf("a message for module %d: the header has room for 0 to %d: %w", m.Module, modules-1, errdefs.ErrInvalidArgument)
	case m.Arg < 0 || m.Arg >= args:
		return nil, fmt.Errorf("a message with channel or type %d: the header has room for 0 to %d: %w", m.Arg, args-1, errdefs.ErrInvalidArgument)
	case uint64(len(m.Payload)) > math.MaxUint32:
		return nil, fmt.Errorf("a message of %d bytes: the header has room for 32 bits: %w", len(m.Payload), errdefs.ErrInvalidArgument)
	}
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.Payload)))
	control := 0
	if m.Control {
		control = modules
	}
	if wide {
		b = binary.LittleEndian.AppendUint16(b, uint16(control|m.Module))
		return binary.LittleEndian.AppendUint16(b, uint16(m.Arg)), nil
	}
	return append(b, byte(control|m.Module), byte(m.Arg)), nil
}

// parseHeader reads a header of narrowSize or wideSize bytes.
func parseHeader(b []byte) (h Header, length uint32) {
	length = binary.LittleEndian.Uint32(b)
	first, modules := int(b[4]), MaxModules
	h.Arg = int(b[5])
	if len(b) == wideSize {
		first, modules = int(binary.LittleEndian.Uint16(b[4:])), MaxModulesWide
		h.Arg = int(binary.LittleEndian.Uint16(b[6:]))
	}
	h.Control, h.Module = first&modules != 0, first&(modules-1)
	return h, length
}

// ConnOptions are the limits of a Conn.
type ConnOptions struct {
	MaxFrame int           // bytes of a payload in either direction; 0: DefaultMaxFrame
	Wide     bool          // take the peer's offer of the wide header (Conn.Widen); else it is an ordinary unknown message
	Timeout  time.Duration // a Write that takes longer ends the connection: the peer does not read; 0: none
}

// Conn is the stream of messages over a connection. One goroutine reads; any number of them write.
type Conn struct {
	conn net.Conn
	opts ConnOptions
	r    *bufio.Reader

	// Of the reader.
	readWide bool
	readErr  error // the stream has lost its frames: for good

	writeWide atomic.Bool
	mu        sync.Mutex // of the writers
	writeErr  error      // part of a frame may be out: for good
	out       []byte
}

// NewConn speaks over conn, which it owns from now on.
func NewConn(conn net.Conn, opts ConnOptions) *Conn {
	if opts.MaxFrame <= 0 {
		opts.MaxFrame = DefaultMaxFrame
	}
	return &Conn{conn: conn, opts: opts, r: bufio.NewReaderSize(conn, oneCopy)}
}

// Read returns the next message; its payload belongs to the caller. The end of the stream between two frames is io.EOF, within
// a frame errdefs.ErrDataLoss; a frame above the limit is errdefs.ErrInvalidArgument. After any error the stream is not read
// again: where the next frame begins is not known.
func (c *Conn) Read() (Message, error) {
	for c.readErr == nil {
		m, err := c.read()
		if err != nil {
			c.readErr = err
			break
		}
		if c.opts.Wide && m.Control && m.Arg == hello && string(m.Payload) == helloWide {
			c.readWide = true
			c.readErr = c.Widen()
			continue
		}
		return m, nil
	}
	return Message{}, c.readErr
}

func (c *Conn) read() (Message, error) {
	var buf [wideSize]byte
	head := buf[:narrowSize]
	if c.readWide {
		head = buf[:wideSize]
	}
	if n, err := io.ReadFull(c.r, head); err != nil {
		return Message{}, truncated(err, n, len(head))
	}
	h, length := parseHeader(head)
	if uint64(length) > uint64(c.opts.MaxFrame) {
		return Message{}, fmt.Errorf("a frame of %d bytes: at most %d are taken; the connection ends: %w", length, c.opts.MaxFrame, errdefs.ErrInvalidArgument)
	}
	payload, err := c.payload(int(length))
	return Message{Header: h, Payload: payload}, err
}

// payload reads so many bytes. The buffer grows with what has come: a header alone costs no memory.
func (c *Conn) payload(length int) ([]byte, error) {
	b := make([]byte, min(length, grow))
	for got := 0; got < length; {
		if got == len(b) {
			b = append(b, make([]byte, min(length-got, max(got, grow)))...)
		}
		n, err := io.ReadFull(c.r, b[got:])
		got += n
		if err != nil {
			return nil, truncated(noEOF(err), got, length)
		}
	}
	return b, nil
}

// truncated says what the end of a stream within a frame means.
func truncated(err error, got, want int) error {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("a frame is cut off: %d bytes of %d came: %w (%w)", got, want, errdefs.ErrDataLoss, err)
	}
	return err
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Write sends one message, whole or not at all: after an error on the connection all further writes fail with it. A message
// above the limit, or with an index that the header has no room for, is refused with errdefs.ErrInvalidArgument, and the
// connection stays usable.
func (c *Conn) Write(m Message) error {
	if err := c.Fits(m); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.write(m)
}

// Fits tells why Write would refuse the message; nothing is sent, and no writer is waited for.
func (c *Conn) Fits(m Message) error {
	if len(m.Payload) > c.opts.MaxFrame {
		return fmt.Errorf("a message of %d bytes: at most %d are sent: %w", len(m.Payload), c.opts.MaxFrame, errdefs.ErrInvalidArgument)
	}
	var head [wideSize]byte
	_, err := m.appendHeader(head[:0], c.Wide())
	return err
}

func (c *Conn) write(m Message) error {
	if c.writeErr != nil {
		return c.writeErr
	}
	out, err := m.appendHeader(c.out[:0], c.writeWide.Load())
	if err != nil {
		return err
	}
	c.out = out
	if c.opts.Timeout > 0 {
		if err := c.conn.SetWriteDeadline(time.Now().Add(c.opts.Timeout)); err != nil {
			return c.broken(err)
		}
	}
	if len(m.Payload) <= oneCopy {
		c.out = append(c.out, m.Payload...)
		_, err = c.conn.Write(c.out)
	} else {
		pieces := net.Buffers{c.out, m.Payload}
		_, err = pieces.WriteTo(c.conn)
	}
	if err != nil {
		return c.broken(err)
	}
	return nil
}

// broken ends the connection, so that the reader learns of it too.
func (c *Conn) broken(err error) error {
	c.writeErr = fmt.Errorf("write a frame: %w (%w)", errdefs.ErrUnavailable, err)
	c.conn.Close()
	return c.writeErr
}

// Widen goes over to the wide header: it tells the peer so, and all later messages have it. A side offers it only where it
// knows that the peer is Tripod's and has ConnOptions.Wide; that side answers with the same when it reads the offer. Each direction
// changes after its own word, so nothing that is under way is misread. A second call does nothing.
func (c *Conn) Widen() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.writeWide.Load() {
		return nil
	}
	if err := c.write(Message{Header: Header{Control: true, Arg: hello}, Payload: []byte(helloWide)}); err != nil {
		return err
	}
	c.writeWide.Store(true)
	return nil
}

// Wide tells whether messages go out with the wide header.
func (c *Conn) Wide() bool { return c.writeWide.Load() }

// Close ends the connection; a Read that waits returns.
func (c *Conn) Close() error { return c.conn.Close() }
