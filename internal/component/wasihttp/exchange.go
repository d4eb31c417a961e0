package wasihttp

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/tripod-run/tripod/internal/component/wasi"
)

// exchange is one request and its response.
type exchange struct {
	state   *wasi.State
	w       http.ResponseWriter
	r       *http.Request
	control *http.ResponseController

	body *wasi.Reader // of the request; nil until the guest asks for it

	// The response: begun when its header has been written, over when nothing more comes.
	begun, over bool
	writing     atomic.Bool // it has begun, for interrupt
	failed      *CodeError  // in place of a response
	out         *outBody    // its body; nil when the guest asks for none

	// ended: w and r are the server's again. A guest that is used for more requests may still have resources of this one.
	ended bool
}

// errEnded ends a guest that answers a request which is over.
var errEnded = errors.New("the resource belongs to a request that is over")

func newExchange(s *wasi.State, w http.ResponseWriter, r *http.Request) *exchange {
	return &exchange{state: s, w: w, r: r, control: http.NewResponseController(w)}
}

// past is a deadline that makes what blocks on the network return at once.
var past = time.Unix(1, 0)

// interrupt makes reads of the request fail, and writes of a response that has begun, also those under way.
func (x *exchange) interrupt() {
	x.interruptRead()
	if x.writing.Load() {
		x.interruptWrite()
	}
}

// interruptWrite does nothing with a server that has no deadlines; there the connection's end is what ends a write.
func (x *exchange) interruptWrite() { _ = x.control.SetWriteDeadline(past) }

func (x *exchange) interruptRead() {
	if err := x.control.SetReadDeadline(past); err != nil {
		_ = x.r.Body.Close()
	}
}

// requestBody is the input of the request's body.
func (x *exchange) requestBody() wasi.Input {
	if x.r.Body == nil || x.r.Body == http.NoBody || x.ended && x.body == nil {
		return wasi.Empty{}
	}
	if x.body == nil {
		// Else a server of HTTP/1.1 reads the rest of the body itself before it writes a response, and waits for it. Others
		// need not be told.
		_ = x.control.EnableFullDuplex()
		x.body = wasi.NewReader(x.r.Body, x.state.Wake)
	}
	return x.body
}

// begin writes the header of the response. What is a field of the server is not among h.
func (x *exchange) begin(response *outgoingResponse) {
	x.begun, x.out = true, response.body
	response.headers.copyTo(x.w.Header(), "")
	if x.w.Header()["Content-Type"] == nil {
		x.w.Header()["Content-Type"] = nil // what it is, the guest knows; net/http would guess
	}
	x.w.WriteHeader(response.status)
	if x.out == nil {
		x.over = true
		return
	}
	x.out.open(x, response.contentLength())
	x.writing.Store(true)
	if x.r.Context().Err() != nil {
		x.interruptWrite()
	}
}

// end is called when the guest's handle has returned; err is its error. It returns when nothing goes on in the background
// any more.
func (x *exchange) end(err error) error {
	x.ended = true
	if x.body != nil {
		x.body.Release(x.interruptRead)
	}
	if x.out != nil && x.out.stream != nil {
		if !x.over && !x.out.stream.Idle() {
			x.interruptWrite()
		}
		_ = x.out.stream.Close()
	}
	switch {
	case err != nil:
	case x.failed != nil:
		err = x.failed
	case !x.begun:
		err = ErrNoResponse
	case !x.over && x.r.Context().Err() == nil && !x.gone():
		err = ErrUnfinished
	}
	if err != nil && x.begun {
		return &begun{err}
	}
	return err
}

// gone tells whether the response could not be written because the client does not take it.
func (x *exchange) gone() bool { return x.out != nil && x.out.lost }

// outBody is the body of a response, the resource outgoing-body.
type outBody struct {
	exchange *exchange    // nil until the response is set
	stream   *wasi.Writer // nil until then, too
	taken    bool         // the guest has its output-stream
	early    *earlyOutput // what the guest writes before the response is set
	lost     bool         // the client takes no more
	limit    int64        // bytes that the content-length leaves; -1: none was given
}

// open joins the body to the response that is being sent.
func (b *outBody) open(x *exchange, length int64) {
	b.exchange, b.limit = x, length
	b.stream = wasi.NewWriter(b, x.control.Flush, x.state.Wake)
	b.stream.Flush() // a guest that takes its time with the body does not hold back the header
	if b.early != nil {
		b.early.join(b.stream)
	}
}

// errTooLong is the guest's stream error when it writes more than its content-length.
var errTooLong = errors.New("HTTP-response-body-size: more bytes than the content-length")

// Write takes the bytes of the body; it is called by the Writer.
func (b *outBody) Write(p []byte) (int, error) {
	if b.limit >= 0 && int64(len(p)) > b.limit {
		return 0, errTooLong
	}
	n, err := b.exchange.w.Write(p)
	if b.limit >= 0 {
		b.limit -= int64(n)
	}
	if err != nil {
		b.lost = !errors.Is(err, http.ErrBodyNotAllowed)
		return n, io.ErrClosedPipe // closed, for the guest: it is not for it to know why
	}
	return n, nil
}

// finish ends the body, with trailers if there are any. The error says what is wrong with it.
func (b *outBody) finish(trailers *fields) error {
	if b.stream == nil { // of a response that was never set
		return nil
	}
	x := b.exchange
	if x.ended { // and with it the stream
		return nil
	}
	if err := b.stream.Close(); err != nil && !errors.Is(err, io.ErrClosedPipe) {
		return err
	}
	if b.limit > 0 && x.r.Method != http.MethodHead && !b.lost {
		return fmt.Errorf("HTTP-response-body-size: %d bytes less than the content-length", b.limit)
	}
	if trailers != nil && len(trailers.list) > 0 {
		// Once the header has gone net/http knows that the length is not, and that there may be trailers.
		if err := x.control.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
			b.lost = true
		}
		trailers.copyTo(x.w.Header(), http.TrailerPrefix)
	}
	x.over = true
	return nil
}

// earlyOutput is an output-stream of a body whose response is not set yet: it takes what fits into a window and has the
// guest wait for more room until then.
type earlyOutput struct {
	state   *wasi.State
	written []byte // held
	to      *wasi.Writer
	closed  bool
}

const earlyWindow = 64 << 10

func (e *earlyOutput) join(to *wasi.Writer) {
	e.to = to
	_ = to.Write(e.written)
	e.forget()
}

func (e *earlyOutput) forget() {
	e.state.Hold(-len(e.written))
	e.written = nil
}

// Close is called when the guest drops the body: what was written of it goes nowhere.
func (b *outBody) Close() error {
	if b.early != nil && b.stream == nil {
		b.early.closed = true
		b.early.forget()
	}
	return nil
}

// Room is documented at wasi.Output, as are the others.
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
	e.written = append(e.written, p...)
	return nil
}

func (e *earlyOutput) Flush() {
	if e.to != nil {
		e.to.Flush()
	}
}

func (e *earlyOutput) Idle() bool { return e.to == nil || e.to.Idle() }

func (e *earlyOutput) Through(p []byte) (bool, error) {
	if e.to != nil {
		return e.to.Through(p)
	}
	if e.closed {
		return true, io.ErrClosedPipe
	}
	if len(e.written)+len(p) > earlyWindow {
		return true, errors.New("the body of a response that is not set has no more room")
	}
	return true, e.Write(p)
}

// contentLength is what the guest says the length of the body is; -1 when it does not.
func (r *outgoingResponse) contentLength() int64 {
	values := r.headers.get("content-length")
	if len(values) != 1 {
		return -1
	}
	n, err := strconv.ParseInt(values[0], 10, 64)
	if err != nil || n < 0 {
		return -1
	}
	return n
}
