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

// StreamWindow bounds the bytes of a response that the guest has not read, in each stream of HTTP/2. The transport must
// enforce it (http.HTTP2Config.MaxReceiveBufferPerStream), because CallSize includes it.
const StreamWindow = 128 << 10

// CallSize is the host memory of one call, in bytes, that the State counts besides headers: the window of a stream or
// the buffers of a connection, and the buffers of both bodies. So the limits of an instance and of a pod on held bytes
// also limit their calls.
const CallSize = StreamWindow + 128<<10

// requestSize returns the host memory of what the guest has set in a request, in bytes, with the trailers of a body that
// is already finished.
func requestSize(r *http.Request, body *outBody) int {
	n := headerSize(r.Header) + headerSize(r.Trailer) + len(r.Method) + len(r.Host) + len(r.URL.Path) + len(r.URL.RawPath) +
		len(r.URL.RawQuery)
	if body != nil {
		n += listSize(body.late.entries())
	}
	return n
}

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
	body *wasi.Reader // the response's body; nil if there is none

	mu       sync.Mutex
	held     int         // the bytes that the State counts for the call, in which those of fields are included
	fields   int         // the bytes of the response's header and trailers
	timer    *time.Timer // enforces the timeout of the present phase
	over     bool        // the call has ended, so nobody takes the response
	answered bool
	response *http.Response
	err      error // of the request, or of the response's body
}

// start sends a request in the background. The State already counts held bytes for it. The call belongs to the caller,
// who must release it.
func start(c *wasi.Call, request *http.Request, body *outBody, t timeouts, held int) *call {
	x := &call{state: c.State, timeouts: t, refs: 1, sent: body, held: held}
	x.ctx, x.cancel = context.WithCancelCause(c.Alive())
	x.request = request.WithContext(x.trace())
	if body != nil {
		x.setBody(body)
	}
	go x.run(c.State.HTTP())
	return x
}

// setBody connects the body of the request. A body that the guest has already finished has a known length.
func (x *call) setBody(body *outBody) {
	late := body.takeLate()
	if body.finished && len(x.request.Trailer) == 0 && len(late) == 0 && x.request.ContentLength < 0 {
		x.request.ContentLength = int64(len(body.early.written))
	}
	var from *io.PipeReader
	from, x.pipe = io.Pipe()
	// While an HTTP/2 transport waits for the body, it does not notice the end of the context.
	pipe := x.pipe
	context.AfterFunc(x.ctx, func() { pipe.CloseWithError(context.Cause(x.ctx)) })
	x.request.Body = &requestBody{from, x}
	body.open(x, nil, x.state.Wake, x.request.ContentLength)
	if x.request.ContentLength == 0 {
		x.request.Body = http.NoBody
	}
	if body.finished {
		go func() { // the early bytes fit into the stream, but sending them can block
			if err := x.state.Guard("outgoing body", func() error { return x.end(body, late) }); err != nil {
				x.cancel(CodeOf(err))
			}
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

// run sends the request, stores the response, and begins to read its body. Most bodies have arrived with the header, so the guest
// finds them there, and need not wait once more.
func (x *call) run(client http.RoundTripper) {
	var response *http.Response
	var body *wasi.Reader
	err := x.state.Guard("outgoing request", func() (err error) {
		response, err = client.RoundTrip(x.request)
		return err
	})
	x.mu.Lock()
	x.timer.Stop()
	switch {
	case err != nil:
		err = x.cause(err)
	case response.StatusCode == http.StatusSwitchingProtocols:
		err = &CodeError{Code: "HTTP-upgrade-failed"}
	case !x.holdFields(response):
		err = &CodeError{Code: "HTTP-response-header-section-size"}
	default:
		x.response = response
		if response.Body != http.NoBody {
			body = wasi.NewReader((*responseBody)(x), x.state.Wake)
		}
	}
	x.answered, x.err, x.body = true, err, body
	x.mu.Unlock()
	if err != nil && response != nil {
		response.Body.Close()
	}
	x.state.Wake()
	if body != nil {
		body.Fill()
		x.state.Wake()
	}
}

// hold adds n to the bytes that the State counts for the call. It returns false at a limit, and if the call has ended.
// The caller holds the lock.
func (x *call) hold(n int) bool {
	if x.over || !x.state.Hold(n) {
		return false
	}
	x.held += n
	return true
}

// holdFields counts the header and the trailers of the response. The names of the trailers can arrive with the header,
// and their values after the body. The caller holds the lock.
func (x *call) holdFields(response *http.Response) bool {
	size := headerSize(response.Header) + headerSize(response.Trailer)
	if !x.hold(size - x.fields) {
		return false
	}
	x.fields = size
	return true
}

// cause returns the error for the guest: the reason why the call was cancelled, if it was.
func (x *call) cause(err error) error {
	if err == nil {
		return nil
	}
	if reason, ok := errors.AsType[*CodeError](context.Cause(x.ctx)); ok {
		return reason
	}
	return CodeOf(err)
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
	response, body, held := x.response, x.body, x.held
	x.mu.Unlock()
	if body != nil {
		body.Release(func() { response.Body.Close() })
	}
	if response != nil {
		response.Body.Close()
	}
	if x.pipe != nil {
		x.pipe.CloseWithError(errDropped)
		_ = x.sent.stream.Close()
	}
	x.state.Hold(-held)
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
	if x.refs == 0 { // the call is over
		return nil
	}
	if err := c.Drain(body.stream.Background()); err != nil {
		return err
	}
	x.mu.Lock()
	held := x.hold(listSize(trailers))
	x.mu.Unlock()
	var err error = &CodeError{Code: "HTTP-request-trailer-section-size"}
	if held {
		err = x.end(body, trailers)
	}
	if err != nil {
		x.cancel(CodeOf(err))
	}
	return err
}

// end sends the rest of the request's body, and ends it.
func (x *call) end(body *outBody, trailers []field) error {
	switch err := body.end(); {
	case errors.Is(err, io.ErrClosedPipe): // the transport has stopped reading; the response says why
		return nil
	case err != nil || body.limit > 0: // longer or shorter than the content-length
		return &CodeError{Code: "HTTP-request-body-size"}
	}
	return x.complete(trailers)
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
func (x *call) abandon() { x.cancel(&CodeError{Code: "HTTP-request-body-size"}) }

// input implements bodySource.
func (x *call) input() wasi.Input {
	if x.body == nil { // set before the guest could get the response
		return wasi.Empty{}
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
	if err == nil {
		return n, nil
	}
	if errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		x.mu.Lock()
		defer x.mu.Unlock()
		if !x.holdFields(x.response) { // the body is complete, but not the trailers
			x.response.Trailer, x.err = nil, &CodeError{Code: "HTTP-response-trailer-section-size"}
		}
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

// announced returns the trailers that the field "trailer" of a header announces, without values. It returns false if one
// of them is no name.
func announced(header http.Header) (trailers http.Header, ok bool) {
	trailers = http.Header{}
	for _, list := range header["Trailer"] {
		for name := range strings.SplitSeq(list, ",") {
			name = http.CanonicalHeaderKey(strings.TrimSpace(name))
			if name != "" && !httpguts.ValidHeaderFieldName(name) { // lists can have empty elements (RFC 9110, 5.6.1)
				return nil, false
			}
			if httpguts.ValidTrailerHeader(name) && name != "" {
				trailers[name] = nil
			}
		}
	}
	return trailers, true
}
