package wasihttp

import (
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/tripod-run/tripod/internal/component/wasi"
)

// defaultTimeout is the default of each timeout in request-options.
const defaultTimeout = 10 * time.Minute

// callSize is the host memory of one call, in bytes, that the State counts: the buffers of a connection and of both
// bodies. So the limits of an instance and of a pod on held bytes also limit their calls.
const callSize = 128 << 10

// errDropped is the cause of a call that ends because the guest has dropped its response.
var errDropped = errors.New("the guest dropped the response")

// timeouts are the values of request-options.
type timeouts struct{ connect, firstByte, betweenBytes time.Duration }

// call is a request of the guest with its response.
type call struct {
	state    *wasi.State
	ctx      context.Context
	cancel   context.CancelCauseFunc
	request  *http.Request
	timeouts timeouts
	pipe     *io.PipeWriter // the request's body; nil if there is none
	sent     *outBody
	trailer  http.Header // the request's trailers, set before the pipe is closed

	// refs counts the resources that can still lead to the response. When it becomes 0, the call ends.
	refs int
	body *wasi.Reader // the response's body; nil until the guest asks for it

	mu       sync.Mutex
	timer    *time.Timer // enforces the timeout of the present phase
	over     bool        // the call has ended, so nobody takes the response
	answered bool
	response *http.Response
	err      error // of the request, or of the response's body
}

// start sends a request in the background. The call belongs to the caller, who must release it.
func start(c *wasi.Call, request *http.Request, body *outBody, t timeouts) *call {
	x := &call{state: c.State, timeouts: t, refs: 1, sent: body}
	x.ctx, x.cancel = context.WithCancelCause(c.Alive())
	if body != nil {
		x.setBody(request, body)
	}
	x.request = request.WithContext(x.trace())
	go x.run(c.State.HTTP())
	return x
}

// setBody connects the body of a request. A body that the guest has already finished has a known length.
func (x *call) setBody(request *http.Request, body *outBody) {
	if body.finished && len(request.Trailer) == 0 && request.ContentLength < 0 {
		request.ContentLength = int64(body.early.size())
	}
	var from *io.PipeReader
	from, x.pipe = io.Pipe()
	request.Body = &requestBody{from, x}
	body.open(x, nil, x.state.Wake, request.ContentLength)
	if request.ContentLength == 0 {
		request.Body = http.NoBody
	}
	if body.finished {
		go func() { // the early bytes fit into the stream, but sending them can block
			if err := body.stream.Close(); err == nil && body.limit <= 0 {
				_ = x.complete(body.late)
				return
			}
			x.abandon()
		}()
	}
}

// trace returns a context for the request that enforces the timeouts until the response arrives.
func (x *call) trace() context.Context {
	x.timer = x.after(x.timeouts.connect, "connection-timeout")
	return httptrace.WithClientTrace(x.ctx, &httptrace.ClientTrace{
		GotConn: func(httptrace.GotConnInfo) {
			x.mu.Lock()
			defer x.mu.Unlock()
			x.timer.Stop()
		},
		WroteRequest: func(httptrace.WroteRequestInfo) { // more than once if the transport repeats the request
			x.mu.Lock()
			defer x.mu.Unlock()
			if !x.answered {
				x.timer.Stop()
				x.timer = x.after(x.timeouts.firstByte, "connection-read-timeout")
			}
		},
	})
}

// after returns a timer that ends the call with an error-code.
func (x *call) after(d time.Duration, code string) *time.Timer {
	return time.AfterFunc(d, func() { x.cancel(&CodeError{Code: code}) })
}

// run sends the request and stores the response.
func (x *call) run(client http.RoundTripper) {
	response, err := client.RoundTrip(x.request)
	if err == nil && response.StatusCode == http.StatusSwitchingProtocols {
		response.Body.Close()
		err = &CodeError{Code: "HTTP-upgrade-failed"}
	}
	x.mu.Lock()
	x.timer.Stop()
	over := x.over
	x.answered, x.err = true, x.cause(err)
	if err == nil {
		x.response = response
	}
	x.mu.Unlock()
	if over && err == nil {
		response.Body.Close()
	}
	x.state.Wake()
}

// cause returns the error for the guest: the reason why the call was cancelled, if it was.
func (x *call) cause(err error) error {
	if err == nil {
		return nil
	}
	if reason, ok := errors.AsType[*CodeError](context.Cause(x.ctx)); ok {
		return reason
	}
	return codeOf(err)
}

// ready reports whether the response has arrived or the request has failed.
func (x *call) ready() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.answered
}

// release drops a reference to the response. After the last one, the call ends, and with it the request's body.
func (x *call) release() {
	if x.refs--; x.refs > 0 {
		return
	}
	x.cancel(errDropped)
	x.mu.Lock()
	x.over = true
	response := x.response
	x.mu.Unlock()
	if x.body != nil {
		x.body.Release(func() { response.Body.Close() })
	}
	if response != nil {
		response.Body.Close()
	}
	if x.pipe != nil {
		x.pipe.CloseWithError(errDropped)
		_ = x.sent.stream.Close()
	}
	x.state.Hold(-callSize)
}

// send implements bodySink: it passes bytes of the request's body to the transport.
func (x *call) send(p []byte) (int, error) {
	n, err := x.pipe.Write(p)
	if err != nil {
		return n, io.ErrClosedPipe // the response says why
	}
	return n, nil
}

// finish implements bodySink.
func (x *call) finish(c *wasi.Call, body *outBody, trailers []field) error {
	if err := c.Drain(body.stream.Background()); err != nil {
		return err
	}
	err := body.stream.Close()
	switch {
	case errors.Is(err, io.ErrClosedPipe): // the transport has stopped reading; the response says why
		return nil
	case err == nil && body.limit > 0:
		err = body.tooShort()
	case err == nil:
		err = x.complete(trailers)
	}
	if err != nil {
		x.abort(codeOf(err))
	}
	return err
}

// complete ends the request's body. net/http sends only trailers that the header announces (RFC 9110, 6.6.2).
func (x *call) complete(trailers []field) error {
	header := http.Header{}
	copyTo(trailers, header, "")
	for name := range header {
		if _, announced := x.request.Trailer[name]; !announced {
			return internalError("the header field trailer does not announce " + strings.ToLower(name))
		}
	}
	x.trailer = header
	return x.pipe.Close()
}

// requestBody is the body of a request for the transport. At its end it sets the trailers, because the transport must
// not see a change before that.
type requestBody struct {
	*io.PipeReader
	call *call
}

func (b *requestBody) Read(p []byte) (int, error) {
	n, err := b.PipeReader.Read(p)
	if errors.Is(err, io.EOF) {
		maps.Copy(b.call.request.Trailer, b.call.trailer)
	}
	return n, err
}

// abandon implements bodySink. The request is corrupt, so it is aborted.
func (x *call) abandon() { x.abort(&CodeError{Code: "HTTP-request-body-size"}) }

func (x *call) abort(code *CodeError) {
	x.cancel(code)
	x.pipe.CloseWithError(code)
}

// input implements bodySource.
func (x *call) input() wasi.Input {
	if x.response == nil || x.response.Body == http.NoBody { // set before the guest could get the response
		return wasi.Empty{}
	}
	if x.body == nil {
		x.body = wasi.NewReader((*responseBody)(x), x.state.Wake)
	}
	return x.body.Background()
}

// trailers implements bodySource.
func (x *call) trailers() (http.Header, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.response.Trailer, x.err
}

// responseBody is a call as the reader of its response's body.
type responseBody call

// Read reads from the response's body. It enforces the timeout between bytes.
func (b *responseBody) Read(p []byte) (int, error) {
	x := (*call)(b)
	timer := x.after(x.timeouts.betweenBytes, "connection-read-timeout")
	n, err := x.response.Body.Read(p)
	timer.Stop()
	if err == nil || errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return n, err
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = &CodeError{Code: "HTTP-response-incomplete"}
	}
	err = x.cause(err)
	x.mu.Lock()
	defer x.mu.Unlock()
	x.err = err
	return n, err
}

// announced returns the trailers that the field "trailer" of a header announces, without values.
func announced(header http.Header) http.Header {
	trailers := http.Header{}
	for _, list := range header["Trailer"] {
		for name := range strings.SplitSeq(list, ",") {
			if name = http.CanonicalHeaderKey(strings.TrimSpace(name)); httpguts.ValidTrailerHeader(name) {
				trailers[name] = nil
			}
		}
	}
	return trailers
}
