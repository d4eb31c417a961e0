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

// exchange is one request with its response.
type exchange struct {
	state   *wasi.State
	w       http.ResponseWriter
	r       *http.Request
	control *http.ResponseController

	body *wasi.Reader // the request's body; nil until the guest asks for it

	// The response has begun when its header is written, and is over when the response is complete.
	begun, over bool
	writing     atomic.Bool // the response has begun and has a body; read by interrupt
	failed      *CodeError  // the error that the guest has set instead of a response
	out         *outBody    // the response's body; nil if the guest asks for none

	// ended means that w and r belong to the server again. The guest can still hold resources of this request.
	ended bool
}

// errEnded ends the guest's call if the guest answers a request that is already over.
var errEnded = errors.New("the resource belongs to a request that is over")

// past is a deadline that makes blocked network operations return immediately.
var past = time.Unix(1, 0)

// interrupt makes reads from the request fail. If the response has begun, it also makes writes to the response fail.
// This includes operations in progress.
func (x *exchange) interrupt() {
	x.interruptRead()
	if x.writing.Load() {
		x.interruptWrite()
	}
}

// interruptWrite makes writes fail. If the server does not support deadlines, interruptWrite does nothing, and a
// write fails only when the connection ends.
func (x *exchange) interruptWrite() { _ = x.control.SetWriteDeadline(past) }

func (x *exchange) interruptRead() {
	if err := x.control.SetReadDeadline(past); err != nil {
		_ = x.r.Body.Close()
	}
}

// requestBody returns the Input for the request's body.
func (x *exchange) requestBody() wasi.Input {
	if x.r.Body == nil || x.r.Body == http.NoBody || x.ended && x.body == nil {
		return wasi.Empty{}
	}
	if x.body == nil {
		// Without this call, an HTTP/1.1 server would read the rest of the body before it writes a response. Ignore
		// the error: a server that does not support the call does not need it either.
		_ = x.control.EnableFullDuplex()
		x.body = wasi.NewReader(x.r.Body, x.state.Wake)
	}
	return x.body
}

// begin writes the header of the response. The guest's headers cannot contain fields that belong to the server.
func (x *exchange) begin(response *outgoingResponse) {
	x.begun, x.out = true, response.body
	response.headers.copyTo(x.w.Header(), "")
	if x.w.Header()["Content-Type"] == nil {
		x.w.Header()["Content-Type"] = nil // keeps net/http from guessing the type
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

// end ends the exchange, and waits for all background work. The parameter err is the error of the guest's handle
// function, if any.
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
	case !x.over && x.r.Context().Err() == nil && (x.out == nil || !x.out.lost):
		err = ErrUnfinished
	}
	if err != nil && x.begun {
		return &startedError{err}
	}
	return err
}

// outBody is the body of a response: the resource outgoing-body.
type outBody struct {
	exchange *exchange    // nil until the response is set
	stream   *wasi.Writer // nil until the response is set
	taken    bool         // the guest has taken the body's output-stream
	early    *earlyOutput // what the guest writes before the response is set
	lost     bool         // a write failed, because the client is gone
	limit    int64        // how many bytes of the content-length are left, or -1 if there is no content-length
}

// open connects the body to the response that is being sent.
func (b *outBody) open(x *exchange, length int64) {
	b.exchange, b.limit = x, length
	b.stream = wasi.NewWriter(b, x.control.Flush, x.state.Wake)
	b.stream.Flush() // sends the header even if the guest writes the body much later
	if b.early != nil {
		b.early.connect(b.stream)
	}
}

// errTooLong is the error of the stream if the guest writes more bytes than the content-length that it has declared.
var errTooLong = errors.New("HTTP-response-body-size: more bytes than the content-length")

// Write writes bytes of the body to the client. The wasi.Writer calls Write.
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
		return n, io.ErrClosedPipe // the guest must not learn the cause
	}
	return n, nil
}

// finish ends the body, with trailers if there are any. If the body's length is wrong, it returns an error.
func (b *outBody) finish(trailers *fields) error {
	if b.stream == nil { // the response was never set
		return nil
	}
	x := b.exchange
	if x.ended { // the stream has ended, too
		return nil
	}
	if err := b.stream.Close(); err != nil && !errors.Is(err, io.ErrClosedPipe) {
		return err
	}
	if b.limit > 0 && x.r.Method != http.MethodHead && !b.lost {
		return fmt.Errorf("HTTP-response-body-size: %d bytes less than the content-length", b.limit)
	}
	if trailers != nil && len(trailers.list) > 0 {
		// Flush sends the header now, so net/http learns that the length is unknown and that trailers can follow.
		if err := x.control.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
			b.lost = true
		}
		trailers.copyTo(x.w.Header(), http.TrailerPrefix)
	}
	x.over = true
	return nil
}

// earlyOutput is the output-stream of a body until the response is set. It accepts up to earlyWindow bytes. To write
// more, the guest must wait until the response is set.
type earlyOutput struct {
	state   *wasi.State
	written []byte // counted by State.Hold
	to      *wasi.Writer
	closed  bool
}

const earlyWindow = 64 << 10

func (e *earlyOutput) connect(to *wasi.Writer) {
	e.to = to
	_ = to.Write(e.written)
	e.discard()
}

func (e *earlyOutput) discard() {
	e.state.Hold(-len(e.written))
	e.written = nil
}

// Close is called when the guest drops the body. If the response has not been set, Close discards what the guest has
// written.
func (b *outBody) Close() error {
	if b.early != nil && b.stream == nil {
		b.early.closed = true
		b.early.discard()
	}
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
		return true, errors.New("the body has no more room until its response is set")
	}
	return true, e.Write(p)
}

// contentLength returns the body length that the guest declares, or -1 if it declares none.
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
