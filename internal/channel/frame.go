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

// Control messages about channels from a runtime to its manager. The other types are in edge/wire.
const (
	OpenChannel  = 3 // Open
	CloseChannel = 4 // ParseClose
)

// Settled is the type of a control message from a manager to a worker of ours: the number of messages with QoS 1 or 2 on this
// connection that the worker need not keep (AppendSettled). Public peers do not send messages of this type.
const Settled = 0x7e

// hello announces that all later frames in the same direction have the wide header (Conn.Widen). Public peers do not
// send messages of this type.
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

	grow    = 256 << 10 // maximum first size of the buffer for a payload; a full buffer at most doubles
	oneCopy = 64 << 10  // maximum size of a payload that is copied and written together with its header
)

// Header is the address of a message.
type Header struct {
	Control bool
	Module  int // index of the module in its runtime
	Arg     int // type of a control message, or number of the channel of any other message
}

// Message is one frame.
type Message struct {
	Header
	Payload []byte
	// Settled is not part of the frame. If it is not nil, the receiver calls it once it need not be sent the message again
	// should it be killed: the broker has the message, or it was dropped. It must not block.
	Settled func()
}

// Settle calls Settled, if there is one.
func (m Message) Settle() {
	if m.Settled != nil {
		m.Settled()
	}
}

// Append appends the message as a frame with the narrow or the wide header. It returns errdefs.ErrInvalidArgument for a
// number that does not fit in the header.
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
		return nil, fmt.Errorf("module %d does not fit in the header: want 0 to %d: %w", m.Module, modules-1, errdefs.ErrInvalidArgument)
	case m.Arg < 0 || m.Arg >= args:
		return nil, fmt.Errorf("channel or type %d does not fit in the header: want 0 to %d: %w", m.Arg, args-1, errdefs.ErrInvalidArgument)
	case uint64(len(m.Payload)) > math.MaxUint32:
		return nil, fmt.Errorf("message of %d bytes: the length has 32 bits: %w", len(m.Payload), errdefs.ErrInvalidArgument)
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
	MaxFrame int           // maximum size of a payload in either direction, in bytes; 0 means DefaultMaxFrame
	Wide     bool          // accept the peer's offer of the wide header (Conn.Widen); without Wide, Read returns the offer as a message
	Timeout  time.Duration // maximum time of a Write, after which the connection ends; 0 means none
}

// Conn sends and receives messages over a connection. One goroutine may read, and any number of goroutines may write.
type Conn struct {
	conn net.Conn
	opts ConnOptions
	r    *bufio.Reader

	// For the reader only.
	readWide bool
	readErr  error // permanent, because the start of the next frame is unknown

	writeWide atomic.Bool
	mu        sync.Mutex // held by a writer
	writeErr  error      // permanent, because part of a frame may have been written
	out       []byte
}

// NewConn takes ownership of conn.
func NewConn(conn net.Conn, opts ConnOptions) *Conn {
	if opts.MaxFrame <= 0 {
		opts.MaxFrame = DefaultMaxFrame
	}
	return &Conn{conn: conn, opts: opts, r: bufio.NewReaderSize(conn, oneCopy)}
}

// Read returns the next message, whose payload belongs to the caller. It returns io.EOF if the stream ends between two
// frames, errdefs.ErrDataLoss if it ends within a frame, and errdefs.ErrInvalidArgument for a frame above the limit.
// Every later Read returns the same error, because the start of the next frame is unknown.
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
		return Message{}, fmt.Errorf("frame of %d bytes: the limit is %d; the connection ends: %w", length, c.opts.MaxFrame,
			errdefs.ErrInvalidArgument)
	}
	payload, err := c.payload(int(length))
	return Message{Header: h, Payload: payload}, err
}

// payload reads a payload of the given length. The buffer grows as bytes arrive, so a header alone costs little memory.
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

// truncated converts the end of a stream within a frame to errdefs.ErrDataLoss.
func truncated(err error, got, want int) error {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("frame cut off after %d of %d bytes: %w (%w)", got, want, errdefs.ErrDataLoss, err)
	}
	return err
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Write sends one message. If the message is above the limit, or has a number that does not fit in the header, Write
// returns errdefs.ErrInvalidArgument, and the connection stays usable. After the connection has failed, every later
// Write returns the same error.
func (c *Conn) Write(m Message) error {
	if err := c.Fits(m); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.write(m)
}

// Fits returns the error that Write would return to refuse the message, or nil. It sends nothing and does not block.
func (c *Conn) Fits(m Message) error {
	if len(m.Payload) > c.opts.MaxFrame {
		return fmt.Errorf("message of %d bytes: the limit is %d: %w", len(m.Payload), c.opts.MaxFrame, errdefs.ErrInvalidArgument)
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

// broken records a write error and closes the connection, so that the reader fails too.
func (c *Conn) broken(err error) error {
	c.writeErr = fmt.Errorf("write a frame: %w (%w)", errdefs.ErrUnavailable, err)
	c.conn.Close()
	return c.writeErr
}

// Widen announces the wide header to the peer and uses it for all later messages. Call it only if the peer is one of
// our programs with ConnOptions.Wide. When the peer reads the announcement, its Conn calls Widen too. Each direction
// switches after its own announcement, so no frame in flight is misread. A second call does nothing.
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

// Wide reports whether messages are sent with the wide header.
func (c *Conn) Wide() bool { return c.writeWide.Load() }

// Close closes the connection. A blocked Read returns.
func (c *Conn) Close() error { return c.conn.Close() }
