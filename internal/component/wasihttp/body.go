package wasihttp

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/textproto"
	"strconv"

	"github.com/tripod-run/tripod/internal/component/wasi"
)

// bodySource is where an incoming-body comes from: the request of an exchange, or the response to a call.
type bodySource interface {
	input() wasi.Input
	// trailers returns the trailers, or the error that ended the body early. Call it at the end of the input.
	trailers() (http.Header, error)
	// release is called when the guest drops the body.
	release()
}

// bodySink is where an outgoing-body goes: the response of an exchange, or the request of a call.
type bodySink interface {
	// send writes bytes of the body, and can block.
	send(p []byte) (int, error)
	// finish ends the body. If the body's length is wrong, it returns an error.
	finish(c *wasi.Call, body *outBody, trailers []field) error
	// abandon is called when the guest drops the body without finishing it.
	abandon()
}

// outBody is the resource outgoing-body. Before the response is set or the request is sent, the sink is nil.
type outBody struct {
	to     bodySink
	stream *wasi.Writer // nil as long as the sink is nil
	taken  bool         // the guest has taken the body's output-stream
	early  earlyOutput  // what the guest writes before there is a sink
	limit  int64        // how many bytes of the content-length are left, or -1 if there is no content-length

	// finished means that the guest has finished the body. If there was no sink then, late holds the trailers, or nil.
	finished bool
	late     *fields
}

func newOutBody(s *wasi.State) *outBody { return &outBody{early: earlyOutput{state: s}} }

// open connects the body to its sink.
func (b *outBody) open(to bodySink, flush func() error, wake func(), length int64) {
	b.to, b.limit = to, length
	b.stream = wasi.NewWriter(b, flush, wake)
	b.early.connect(b.output())
}

// output returns the Output for the guest.
func (b *outBody) output() wasi.Output {
	if _, outgoing := b.to.(*call); outgoing {
		return b.stream.Background()
	}
	return b.stream
}

// errTooLong is the error of the stream if the guest writes more bytes than the content-length that it has declared.
var errTooLong = errors.New("HTTP-request-body-size or HTTP-response-body-size: more bytes than the content-length")

// end ends the stream when everything is written.
func (b *outBody) end() error {
	err := b.stream.Close()
	b.early.discard()
	return err
}

func (b *outBody) tooShort() error {
	return fmt.Errorf("%d bytes less than the content-length", b.limit)
}

// Write writes bytes of the body to the sink. The wasi.Writer calls Write.
func (b *outBody) Write(p []byte) (int, error) {
	if b.limit >= 0 && int64(len(p)) > b.limit {
		return 0, errTooLong
	}
	n, err := b.to.send(p)
	if b.limit >= 0 {
		b.limit -= int64(n)
	}
	return n, err
}

// finish ends the body, and takes the trailers, which are nil if there are none.
func (b *outBody) finish(c *wasi.Call, trailers *fields) error {
	b.finished = true
	if b.to == nil && !b.early.closed {
		b.early.closed, b.late = true, trailers
		return nil
	}
	defer trailers.Close()
	if b.to == nil {
		return nil
	}
	return b.to.finish(c, b, trailers.entries())
}

// takeLate returns the trailers of a body that was finished before it had a sink. They no longer count as held.
func (b *outBody) takeLate() []field {
	list := b.late.entries()
	_ = b.late.Close()
	b.late = nil
	return list
}

// lose is called when the request or response of the body is dropped or sent. If the body has no sink then, it will
// never have one, so lose discards what the guest has written. A nil outBody has nothing to discard.
func (b *outBody) lose() {
	if b == nil || b.to != nil {
		return
	}
	b.early.closed = true
	b.early.discard()
	b.takeLate()
}

// earlyOutput is the output-stream of a body until the response is set or the request is sent. It accepts up to
// earlyWindow bytes. To write more, the guest must wait until then.
type earlyOutput struct {
	state   *wasi.State
	written []byte
	held    int // bytes that were written early, counted by State.Hold until the body has ended
	to      wasi.Output
	closed  bool
}

// earlyWindow is what wasmtime-wasi-http accepts too. Guests that build an answer of some size before they set the response
// are written against that.
const earlyWindow = 1 << 20

func (e *earlyOutput) connect(to wasi.Output) {
	e.to = to
	_ = to.Write(e.written)
	e.written = nil
}

func (e *earlyOutput) discard() {
	e.written = nil
	e.state.Hold(-e.held)
	e.held = 0
}

// Close is called when the guest drops the body without finishing it. If there is no sink yet, Close discards what the
// guest has written.
func (b *outBody) Close() error {
	if b.to != nil {
		b.to.abandon()
		b.early.discard()
	}
	b.lose()
	return nil
}

// Room implements wasi.Output. So do the methods below.
func (e *earlyOutput) Room() (int, error) {
	if e.to != nil {
		return e.to.Room()
	}
	if e.closed {
		return 0, io.ErrClosedPipe
	}
	return earlyWindow - len(e.written), nil
}

func (e *earlyOutput) Write(p []byte) error {
	if e.to != nil {
		return e.to.Write(p)
	}
	if !e.state.Hold(len(p)) {
		return wasi.ErrHeld
	}
	e.held += len(p)
	e.written = append(e.written, p...)
	return nil
}

func (e *earlyOutput) Flush() {
	if e.to != nil {
		e.to.Flush()
	}
}

func (e *earlyOutput) Busy() bool { return e.to != nil && e.to.Busy() }

func (e *earlyOutput) Idle() bool { return e.to == nil || e.to.Idle() }

func (e *earlyOutput) Through(p []byte) (bool, error) {
	if e.to != nil {
		return e.to.Through(p)
	}
	if e.closed {
		return true, io.ErrClosedPipe
	}
	if len(e.written)+len(p) > earlyWindow {
		return true, errors.New("the body has no more room until its response is set or its request is sent")
	}
	return true, e.Write(p)
}

// contentLength returns the body length that the guest declares, or -1 if it declares none. It returns false if the
// guest declares different lengths, or something else than a length: recipients could disagree about where such a body
// ends (RFC 9112, 6.3).
func (f *fields) contentLength() (int64, bool) {
	length := int64(-1)
	for _, v := range f.get("content-length") {
		n, err := strconv.ParseUint(textproto.TrimString(v), 10, 63)
		if err != nil || length >= 0 && int64(n) != length {
			return -1, false
		}
		length = int64(n)
	}
	return length, true
}
