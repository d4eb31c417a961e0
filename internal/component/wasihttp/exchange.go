package wasihttp

import (
	"context"
	"errors"
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
	lost        bool        // a write failed, because the client is gone

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
		x.body = wasi.NewReader(x.r.Body, x.state.Wake)
	}
	return x.body
}

// begin writes the header of the response. The guest's headers cannot contain fields that belong to the server.
// If its length is not clear, the answer is an error instead.
func (x *exchange) begin(response *outgoingResponse) {
	length, ok := response.headers.contentLength()
	if !ok {
		x.failed = internalError("the response has content-lengths that differ or are no numbers")
		return
	}
	x.begun, x.out = true, response.body
	x.copyHeader(response.headers.list)
	if length >= 0 {
		x.w.Header()["Content-Length"] = []string{strconv.FormatInt(length, 10)} // once
	}
	if x.w.Header()["Content-Type"] == nil {
		x.w.Header()["Content-Type"] = nil // keeps net/http from guessing the type
	}
	x.w.WriteHeader(response.status)
	if x.out == nil {
		x.over = true
		return
	}
	x.out.open(x, x.control.Flush, x.state.Wake, length)
	x.out.stream.Flush() // sends the header even if the guest writes the body much later
	x.writing.Store(true)
	if x.r.Context().Err() != nil {
		x.interruptWrite()
	}
	if x.out.finished {
		_ = x.finish(nil, x.out, x.out.takeLate()) // if the length is wrong, the response stays unfinished
	}
}

// copyHeader adds fields to the header of the response, except te, which only requests have (RFC 9110, 10.1.4).
func (x *exchange) copyHeader(list []field) {
	copyTo(list, x.w.Header(), "")
	x.w.Header().Del("Te")
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
	case x.begun && x.r.Method == http.MethodHead && errors.Is(err, context.Canceled):
		// The header is the whole response. An HTTP/2 server ends the request's context when it has sent the header.
		return nil
	case err != nil:
	case x.failed != nil:
		err = x.failed
	case !x.begun:
		err = ErrNoResponse
	case !x.over && x.r.Context().Err() == nil && !x.lost:
		err = ErrUnfinished
	}
	if err != nil && x.begun {
		return &startedError{err}
	}
	return err
}

// send implements bodySink: it writes bytes of the response's body to the client.
func (x *exchange) send(p []byte) (int, error) {
	n, err := x.w.Write(p)
	if err != nil {
		x.lost = !errors.Is(err, http.ErrBodyNotAllowed)
		return n, io.ErrClosedPipe // the guest must not learn the cause
	}
	return n, nil
}

// finish implements bodySink.
func (x *exchange) finish(c *wasi.Call, body *outBody, trailers []field) error {
	if x.ended { // the stream has ended, too
		return nil
	}
	if err := body.end(); err != nil && !errors.Is(err, io.ErrClosedPipe) {
		return err
	}
	if body.limit > 0 && x.r.Method != http.MethodHead && !x.lost {
		return body.tooShort()
	}
	if len(trailers) > 0 {
		// Flush sends the header now, so net/http learns that the length is unknown and that trailers can follow.
		if err := x.control.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
			x.lost = true
		}
		copyTo(trailers, x.w.Header(), http.TrailerPrefix)
	}
	x.over = true
	return nil
}

// abandon implements bodySink. The response stays unfinished, which end reports.
func (x *exchange) abandon() {}

// The methods below implement bodySource.

func (x *exchange) input() wasi.Input { return x.requestBody() }

func (x *exchange) trailers() (http.Header, error) { return x.r.Trailer, nil }

func (x *exchange) release() {} // the exchange lasts as long as the request
