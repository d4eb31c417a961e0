package channel

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Types of control messages that this package does not know.
const (
	create    = 0
	remove    = 1
	stop      = 2
	exited    = 2
	moduleLog = 5
)

// golden are recorded frames of public peers (the edge protocol's "Golden frames").
var golden = []struct {
	name string
	hex  string
	text string // of the payload, after what hex says
	m    Message
}{
	{"create on index 0", "0c000000 80 00", `{"index": 0}`, Message{Header{true, 0, create}, []byte(`{"index": 0}`), nil}},
	{"open channel fd 0, write, by a C peer", "11000000 80 03 00 02", "$SL/proc/stdio\x00",
		Message{Header{true, 0, OpenChannel}, []byte("\x00\x02$SL/proc/stdio\x00"), nil}},
	{"open channel fd 0, readwrite", "10000000 80 03 00 03", "$SL/proc/stdio",
		Message{Header{true, 0, OpenChannel}, []byte("\x00\x03$SL/proc/stdio"), nil}},
	{"publish on module 0, channel 0", "19000000 00 00", "hello argc=2 [a] SLTEST=1",
		Message{Header{false, 0, 0}, []byte("hello argc=2 [a] SLTEST=1"), nil}},
	{"module 0 exited", "14000000 80 02", `{"status": "exited"}`, Message{Header{true, 0, exited}, []byte(`{"status": "exited"}`), nil}},
	{"delete module 0", "00000000 80 01", "", Message{Header{true, 0, remove}, []byte{}, nil}},
	{"stop runtime", "00000000 80 02", "", Message{Header{true, 0, stop}, []byte{}, nil}},
	{"receive on module 127, channel 255", "02000000 7f ff", "ab", Message{Header{false, 127, 255}, []byte("ab"), nil}},
	{"module 127 logs", "01000000 ff 05", "x", Message{Header{true, 127, moduleLog}, []byte("x"), nil}},
}

func frame(t *testing.T, h, text string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(h, " ", ""))
	require.NoError(t, err)
	return append(b, text...)
}

// pipe is a connection with its other end.
func pipe(t *testing.T, opts ConnOptions) (*Conn, net.Conn) {
	t.Helper()
	a, b := net.Pipe()
	t.Cleanup(func() { a.Close(); b.Close() })
	return NewConn(a, opts), b
}

// fed returns a connection that has received the bytes and then ended.
func fed(b []byte, opts ConnOptions) *Conn { return NewConn(&bytesConn{r: bytes.NewReader(b)}, opts) }

type bytesConn struct {
	net.Conn
	r io.Reader
	w bytes.Buffer
}

func (c *bytesConn) Read(b []byte) (int, error)       { return c.r.Read(b) }
func (c *bytesConn) Write(b []byte) (int, error)      { return c.w.Write(b) }
func (c *bytesConn) Close() error                     { return nil }
func (c *bytesConn) SetWriteDeadline(time.Time) error { return nil }

func TestGoldenFrames(t *testing.T) {
	for _, g := range golden {
		t.Run(g.name, func(t *testing.T) {
			want := frame(t, g.hex, g.text)
			got, err := g.m.Append(nil, false)
			require.NoError(t, err)
			assert.Equal(t, hex.EncodeToString(want), hex.EncodeToString(got))
			m, err := fed(want, ConnOptions{}).Read()
			require.NoError(t, err)
			assert.Equal(t, g.m, m)
		})
	}
}

func TestFramesOneAfterTheOther(t *testing.T) {
	var all []byte
	for _, g := range golden {
		all = append(all, frame(t, g.hex, g.text)...)
	}
	c := fed(all, ConnOptions{})
	for _, g := range golden {
		m, err := c.Read()
		require.NoError(t, err)
		assert.Equal(t, g.m, m, g.name)
	}
	_, err := c.Read()
	assert.ErrorIs(t, err, io.EOF)
	assert.False(t, errdefs.IsDataLoss(err))
}

func TestAnOversizedFrameEndsTheStream(t *testing.T) {
	b := frame(t, "01000001 80 05", "")              // 16 MiB and a byte are announced
	b = append(b, frame(t, "00000000 80 01", "")...) // not read any more
	c := fed(b, ConnOptions{})
	for range 2 {
		_, err := c.Read()
		require.ErrorIs(t, err, errdefs.ErrInvalidArgument)
	}
	_, err := fed(frame(t, "05000000 80 05", "12345"), ConnOptions{MaxFrame: 4}).Read()
	assert.ErrorIs(t, err, errdefs.ErrInvalidArgument)
	m, err := fed(frame(t, "04000000 80 05", "1234"), ConnOptions{MaxFrame: 4}).Read()
	require.NoError(t, err)
	assert.Equal(t, "1234", string(m.Payload))
}

func TestATruncatedFrameIsDataLoss(t *testing.T) {
	whole := frame(t, "14000000 80 02", `{"status": "exited"}`)
	for n := 1; n < len(whole); n++ {
		_, err := fed(whole[:n], ConnOptions{}).Read()
		require.ErrorIs(t, err, errdefs.ErrDataLoss, "%d bytes", n)
		require.NotErrorIs(t, err, io.EOF)
	}
}

// A header with the maximum length uses no more memory than the bytes that follow it.
func TestAHeaderAloneCostsNoMemory(t *testing.T) {
	b := frame(t, "00000001 80 05", "abc")
	var err error
	allocated := testing.Benchmark(func(b2 *testing.B) {
		b2.ReportAllocs()
		for range b2.N {
			_, err = fed(b, ConnOptions{}).Read()
		}
	}).AllocedBytesPerOp()
	require.ErrorIs(t, err, errdefs.ErrDataLoss)
	assert.Less(t, allocated, int64(1<<20))
}

func TestWriteRefusesWhatTheHeaderCannotSay(t *testing.T) {
	c := fed(nil, ConnOptions{MaxFrame: 4})
	for _, m := range []Message{
		{Header: Header{Module: MaxModules}}, {Header: Header{Module: -1}}, {Header: Header{Arg: MaxChannels}}, {Header: Header{Arg: -1}},
		{Payload: make([]byte, 5)},
	} {
		assert.ErrorIs(t, c.Write(m), errdefs.ErrInvalidArgument)
	}
	assert.NoError(t, c.Write(Message{Payload: make([]byte, 4)}), "and the connection stays usable")
}

func TestManyWriters(t *testing.T) {
	c, peer := pipe(t, ConnOptions{})
	const writers, each = 8, 50
	var all sync.WaitGroup
	for w := range writers {
		all.Go(func() {
			for i := range each {
				payload := bytes.Repeat([]byte{byte(w)}, i*3000) // some go out in two pieces
				assert.NoError(t, c.Write(Message{Header{false, w, i}, payload, nil}))
			}
		})
	}
	r := NewConn(peer, ConnOptions{})
	next := map[int]int{}
	for range writers * each {
		m, err := r.Read()
		require.NoError(t, err)
		require.Equal(t, next[m.Module], m.Arg)
		require.Equal(t, bytes.Repeat([]byte{byte(m.Module)}, m.Arg*3000), m.Payload)
		next[m.Module]++
	}
	all.Wait()
}

func TestAPeerThatDoesNotReadEndsTheConnection(t *testing.T) {
	c, _ := pipe(t, ConnOptions{Timeout: 20 * time.Millisecond})
	require.ErrorIs(t, c.Write(Message{Payload: []byte("x")}), errdefs.ErrUnavailable)
	require.ErrorIs(t, c.Write(Message{}), errdefs.ErrUnavailable, "part of a frame may be out")
	_, err := c.Read()
	assert.Error(t, err, "the reader learns of it")
}

func TestWideHeader(t *testing.T) {
	m := Message{Header{true, 300, 400}, []byte("x"), nil}
	b, err := m.Append(nil, true)
	require.NoError(t, err)
	assert.Equal(t, "01000000"+"2c81"+"9001"+"78", hex.EncodeToString(b))

	a, b2 := net.Pipe()
	defer a.Close()
	defer b2.Close()
	runtime, manager := NewConn(a, ConnOptions{Wide: true}), NewConn(b2, ConnOptions{Wide: true})
	narrow, wide := Message{Header{false, 1, 2}, []byte("narrow"), nil}, Message{Header{false, 5000, 60000}, []byte("wide"), nil}
	require.ErrorIs(t, runtime.Write(wide), errdefs.ErrInvalidArgument)
	go func() {
		assert.NoError(t, runtime.Write(narrow))
		assert.NoError(t, runtime.Widen())
		assert.NoError(t, runtime.Widen(), "a second time does nothing")
		assert.NoError(t, runtime.Write(wide))
	}()
	// The manager's answer waits for the runtime to read.
	answered := make(chan error, 1)
	go func() {
		m, err := runtime.Read()
		if err == nil && m.Module != 5000 {
			err = fmt.Errorf("read %+v", m)
		}
		answered <- err
	}()
	for _, want := range []Message{narrow, wide} {
		m, err := manager.Read()
		require.NoError(t, err)
		assert.Equal(t, want, m)
	}
	assert.True(t, manager.Wide())
	require.NoError(t, manager.Write(wide))
	require.NoError(t, <-answered)
}

func TestAnOfferOfTheWideHeaderIsNotTakenFromForeignPeers(t *testing.T) {
	b := frame(t, "0d000000 80 7f", helloWide)
	c := fed(b, ConnOptions{})
	m, err := c.Read()
	require.NoError(t, err)
	assert.Equal(t, hello, m.Arg, "an unknown message as any other")
	assert.False(t, c.Wide())
}

func FuzzFrames(f *testing.F) {
	for _, g := range golden {
		b, err := g.m.Append(nil, false)
		require.NoError(f, err)
		f.Add(b, false)
		f.Add(append(b, b...), true)
	}
	f.Add([]byte{13, 0, 0, 0, 0x80, 0x7f, 't', 'r', 'i', 'p', 'o', 'd', '-', 'w', 'i', 'd', 'e', '-', '1', 1, 0, 0, 0, 2, 0x80, 3, 0, 'x'},
		true)
	f.Fuzz(func(t *testing.T, stream []byte, wide bool) {
		const limit = 1 << 10
		conn := &bytesConn{r: bytes.NewReader(stream)}
		c := NewConn(conn, ConnOptions{MaxFrame: limit, Wide: wide})
		var again []byte
		for {
			m, err := c.Read()
			if err != nil {
				if !errors.Is(err, io.EOF) && !errdefs.IsDataLoss(err) && !errdefs.IsInvalidArgument(err) {
					t.Fatalf("an error without a class: %v", err)
				}
				break
			}
			if len(m.Payload) > limit {
				t.Fatalf("%d bytes came through", len(m.Payload))
			}
			if c.readWide {
				continue
			}
			if again, err = m.Append(again, false); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.HasPrefix(stream, again) {
			t.Fatalf("read as %x", again)
		}
	})
}

func TestLengthOfTheHeaderIsTheLimitOfTheStream(t *testing.T) {
	b := binary.LittleEndian.AppendUint32(nil, 0xffffffff)
	_, err := fed(append(b, 0x80, 0), ConnOptions{MaxFrame: 1 << 20}).Read()
	require.ErrorIs(t, err, errdefs.ErrInvalidArgument)
}
