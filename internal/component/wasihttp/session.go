package wasihttp

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wit"
)

// Session is the host's side of one instance. Only one goroutine at a time may use it.
type Session struct {
	state *wasi.State
}

// NewSession makes the host's side of an instance. The Session must be the instance's InstanceOptions.Host.
func NewSession(o wasi.Options) *Session { return &Session{state: wasi.NewState(o)} }

// WASI returns the instance's State.
func (s *Session) WASI() *wasi.State { return s.state }

// Close releases what the guest has left open. Close the instance first.
func (s *Session) Close() { s.state.Close() }

// Serve lets the guest answer one request. The parameter call is a function that must call the guest's handle function
// (see Signature) with params. Serve returns when the response has been written or has failed. It returns the error of
// call, or one of the errors below. After an error, answer the client with Fail.
//
// A client that disconnects is not an error of the guest. When that happens, the guest's streams end, and so does the
// context of r.
func (s *Session) Serve(w http.ResponseWriter, r *http.Request, call func(ctx context.Context, params []byte) error) error {
	x := &exchange{state: s.state, w: w, r: r, control: http.NewResponseController(w)}
	if r.Body != nil && r.Body != http.NoBody {
		// Without this call, an HTTP/1.1 server would read the rest of the body, or drop it, before it writes a
		// response. A guest can begin its response before it asks for the body, so the call cannot wait until then.
		// Ignore the error: a server that does not support the call does not need it either.
		_ = x.control.EnableFullDuplex()
	}
	params := wit.AppendU32(nil, s.state.Put(&incomingRequest{exchange: x}))
	params = wit.AppendU32(params, s.state.Put(&outparam{exchange: x}))
	interrupted := make(chan struct{})
	stop := context.AfterFunc(r.Context(), func() {
		defer close(interrupted)
		x.interrupt()
	})
	defer func() {
		if !stop() {
			<-interrupted // the function above must not use w after Serve returns
		}
	}()
	return x.end(call(r.Context(), params))
}

// Errors of guests that misbehave without a trap.
var (
	// ErrNoResponse means that handle returned without calling response-outparam.set.
	ErrNoResponse = fmt.Errorf("the guest gave no response: %w", errdefs.ErrInternal)
	// ErrUnfinished means that the guest did not finish the body of its response, or wrote fewer bytes than the
	// content-length that it had declared.
	ErrUnfinished = fmt.Errorf("the guest did not finish its response: %w", errdefs.ErrInternal)
)

// statuses maps error-codes to HTTP statuses. An error-code that is not listed counts as an internal error.
var statuses = map[string]int{
	"HTTP-request-denied": http.StatusForbidden, "HTTP-request-length-required": http.StatusLengthRequired,
	"HTTP-request-body-size": http.StatusRequestEntityTooLarge, "HTTP-request-method-invalid": http.StatusMethodNotAllowed,
	"HTTP-request-URI-invalid": http.StatusBadRequest, "HTTP-request-URI-too-long": http.StatusRequestURITooLong,
	"HTTP-request-header-section-size":  http.StatusRequestHeaderFieldsTooLarge,
	"HTTP-request-header-size":          http.StatusRequestHeaderFieldsTooLarge,
	"HTTP-request-trailer-section-size": http.StatusRequestHeaderFieldsTooLarge,
	"HTTP-request-trailer-size":         http.StatusRequestHeaderFieldsTooLarge,
	"HTTP-protocol-error":               http.StatusBadRequest, "loop-detected": http.StatusLoopDetected,
	"HTTP-response-timeout": http.StatusGatewayTimeout, "DNS-timeout": http.StatusGatewayTimeout,
	"connection-timeout":      http.StatusGatewayTimeout,
	"connection-read-timeout": http.StatusGatewayTimeout, "connection-write-timeout": http.StatusGatewayTimeout,
	"DNS-error": http.StatusBadGateway, "destination-not-found": http.StatusBadGateway, "destination-unavailable": http.StatusBadGateway,
	"destination-IP-prohibited": http.StatusBadGateway, "destination-IP-unroutable": http.StatusBadGateway,
	"connection-refused": http.StatusBadGateway, "connection-terminated": http.StatusBadGateway,
	"connection-limit-reached": http.StatusBadGateway,
	"TLS-protocol-error":       http.StatusBadGateway, "TLS-certificate-error": http.StatusBadGateway,
	"TLS-alert-received": http.StatusBadGateway,
}

// Status returns the HTTP status for an error of Serve: 504 for a timeout, 503 for an exhausted resource, 500 for a
// trap and other errors of the guest.
func Status(err error) int {
	if code, ok := errors.AsType[*CodeError](err); ok && statuses[code.Code] != 0 {
		return statuses[code.Code]
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return http.StatusGatewayTimeout
	case errdefs.IsResourceExhausted(err), errdefs.IsUnavailable(err):
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}

// startedError is an error that occurred after the header of the response was sent.
type startedError struct{ error }

func (e *startedError) Unwrap() error { return e.error }

// Fail answers a request after Serve has returned err. The answer contains a status, but not the cause, which belongs
// in the log. If the response has started, Fail aborts it by panicking with http.ErrAbortHandler, so call Fail last, in
// the handler's goroutine.
func Fail(w http.ResponseWriter, err error) {
	if _, ok := errors.AsType[*startedError](err); ok {
		panic(http.ErrAbortHandler)
	}
	status := Status(err)
	http.Error(w, http.StatusText(status), status)
}
