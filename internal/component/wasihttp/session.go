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

// Session is the host's side of one instance. One goroutine at a time uses it.
type Session struct {
	state *wasi.State
}

// NewSession makes the host's side of an instance; it is what the instance's Host must be.
func NewSession(o wasi.Options) *Session { return &Session{state: wasi.NewState(o)} }

// WASI is the instance's State.
func (s *Session) WASI() *wasi.State { return s.state }

// Close releases what the guest has left, once its instance is closed.
func (s *Session) Close() { s.state.Close() }

// Serve answers one request by the guest. call is to call the guest's handle, as Signature describes it, with these
// parameters. Serve returns when the response has been written, or was given up. Its error is that of call, or one of
// the below; Fail is for writing it.
//
// A client that goes away is no error of the guest: it sees its streams end, and r's context.
func (s *Session) Serve(w http.ResponseWriter, r *http.Request, call func(ctx context.Context, params []byte) error) error {
	x := newExchange(s.state, w, r)
	params := wit.AppendU32(nil, s.state.Put(&incomingRequest{exchange: x}))
	params = wit.AppendU32(params, s.state.Put(&outparam{exchange: x}))
	interrupted := make(chan struct{})
	stop := context.AfterFunc(r.Context(), func() {
		defer close(interrupted)
		x.interrupt()
	})
	defer func() {
		if !stop() {
			<-interrupted // the writer must not be used after its handler
		}
	}()
	return x.end(call(r.Context(), params))
}

// What a guest can do wrong without a trap.
var (
	// ErrNoResponse: handle returned without response-outparam.set.
	ErrNoResponse = fmt.Errorf("the guest gave no response: %w", errdefs.ErrInternal)
	// ErrUnfinished: the guest did not finish the body of its response, or not with as many bytes as its content-length.
	ErrUnfinished = fmt.Errorf("the guest did not finish its response: %w", errdefs.ErrInternal)
)

// CodeError is an error-code that the guest has set in place of a response.
type CodeError struct {
	// Code is the name of the case: "HTTP-request-denied".
	Code string
	// Message is that of internal-error, if there is one.
	Message string
}

func (e *CodeError) Error() string {
	if e.Message == "" {
		return "the guest answered with the error " + e.Code
	}
	return "the guest answered with the error " + e.Code + ": " + e.Message
}

// statuses are the answers for error-codes that are not just the guest's own trouble.
var statuses = map[string]int{
	"HTTP-request-denied": http.StatusForbidden, "HTTP-request-length-required": http.StatusLengthRequired,
	"HTTP-request-body-size": http.StatusRequestEntityTooLarge, "HTTP-request-method-invalid": http.StatusMethodNotAllowed,
	"HTTP-request-URI-invalid": http.StatusBadRequest, "HTTP-request-URI-too-long": http.StatusRequestURITooLong,
	"HTTP-request-header-section-size": http.StatusRequestHeaderFieldsTooLarge, "HTTP-request-header-size": http.StatusRequestHeaderFieldsTooLarge,
	"HTTP-request-trailer-section-size": http.StatusRequestHeaderFieldsTooLarge, "HTTP-request-trailer-size": http.StatusRequestHeaderFieldsTooLarge,
	"HTTP-protocol-error": http.StatusBadRequest, "loop-detected": http.StatusLoopDetected,
	"HTTP-response-timeout": http.StatusGatewayTimeout, "DNS-timeout": http.StatusGatewayTimeout, "connection-timeout": http.StatusGatewayTimeout,
	"connection-read-timeout": http.StatusGatewayTimeout, "connection-write-timeout": http.StatusGatewayTimeout,
	"DNS-error": http.StatusBadGateway, "destination-not-found": http.StatusBadGateway, "destination-unavailable": http.StatusBadGateway,
	"destination-IP-prohibited": http.StatusBadGateway, "destination-IP-unroutable": http.StatusBadGateway,
	"connection-refused": http.StatusBadGateway, "connection-terminated": http.StatusBadGateway, "connection-limit-reached": http.StatusBadGateway,
	"TLS-protocol-error": http.StatusBadGateway, "TLS-certificate-error": http.StatusBadGateway, "TLS-alert-received": http.StatusBadGateway,
}

// Status is the HTTP status for an error of Serve: 504 when time is up, 503 when something is used up, 500 for a trap and
// what else the guest does wrong.
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

// begun is an error of a response whose header has gone out.
type begun struct{ error }

func (b *begun) Unwrap() error { return b.error }

// Fail answers a request whose Serve failed: with a status and no word of the cause, which is for the log. When the
// response has begun it breaks it off instead, by the panic http.ErrAbortHandler, as net/http wants it: call it last, in
// the handler's own goroutine.
func Fail(w http.ResponseWriter, err error) {
	if _, ok := errors.AsType[*begun](err); ok {
		panic(http.ErrAbortHandler)
	}
	status := Status(err)
	http.Error(w, http.StatusText(status), status)
}
