package wasihttp

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/textproto"
	"reflect"
	"strings"
	"syscall"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wit"
)

// CodeError is an error-code of wasi:http: one that the guest has set instead of a response, or one that says why a
// request of the guest failed. An http.RoundTripper for guests returns CodeErrors for what only it knows, such as the
// failures of connections.
type CodeError struct {
	// Code is the name of the case, such as "HTTP-request-denied".
	Code string
	// Message is the payload of internal-error, the rcode of DNS-error, or the alert-message of TLS-alert-received; "" for
	// none.
	Message string
	// Alert is the alert-id of TLS-alert-received (RFC 8446, 6); 0 for none.
	Alert uint8
}

func (e *CodeError) Error() string {
	if e.Message == "" {
		return "the wasi:http error " + e.Code
	}
	return "the wasi:http error " + e.Code + ": " + e.Message
}

// internalError is the code without a case of its own.
func internalError(message string) *CodeError {
	return &CodeError{Code: "internal-error", Message: message}
}

// readCode reads an error-code. It ignores payloads, except the payload of internal-error.
func readCode(in *wit.Reader) *CodeError {
	i := in.Case(len(errorCodes().Cases))
	e := &CodeError{Code: errorCodes().Cases[i].Name}
	if e.Code == "internal-error" && in.Option() {
		e.Message = in.String()
	}
	in.Raw(len(in.Rest()))
	return e
}

// appendCode writes an error-code. All payloads are options or records of options, except field names of trailers, which
// are never written.
func appendCode(dst []byte, e *CodeError) []byte {
	dst = wit.AppendCase(dst, caseOf(e.Code))
	message := func() {
		dst = wit.AppendOption(dst, e.Message != "")
		if e.Message != "" {
			dst = wit.AppendString(dst, strings.ToValidUTF8(e.Message, "\uFFFD"))
		}
	}
	switch payload := errorCodes().Cases[caseOf(e.Code)].Type; {
	case e.Code == "internal-error":
		message()
	case e.Code == "DNS-error":
		message()
		dst = wit.AppendOption(dst, false)
	case e.Code == "TLS-alert-received":
		dst = wit.AppendOption(dst, e.Alert != 0)
		if e.Alert != 0 {
			dst = wit.AppendU8(dst, e.Alert)
		}
		message()
	case payload == nil:
	case payload.Kind == wit.Record:
		for range payload.Fields {
			dst = wit.AppendOption(dst, false)
		}
	default:
		dst = wit.AppendOption(dst, false)
	}
	return dst
}

// failedWithCode writes an error result with an error-code.
func failedWithCode(c *wasi.Call, e *CodeError) {
	c.Failed()
	c.Out = appendCode(c.Out, e)
}

// failures maps errors of net/http that have no type of their own, by a part of their texts.
var failures = []struct{ text, code string }{
	{"server response headers exceeded", "HTTP-response-header-section-size"},
	{"response header list larger than advertised limit", "HTTP-response-header-section-size"},
	{"http: ContentLength=", "HTTP-request-body-size"},
	{"TLS handshake timeout", "connection-timeout"},
	{"timeout awaiting response headers", "connection-read-timeout"},
	{"unsupported transfer encoding", "HTTP-response-transfer-coding"},
	{"malformed HTTP", "HTTP-protocol-error"},
	{"malformed chunked encoding", "HTTP-protocol-error"},
	{"invalid byte in chunk length", "HTTP-protocol-error"},
	{"stream error: stream ID", "HTTP-protocol-error"}, // RFC 9113, 5.4.2
	{"connection error: ", "HTTP-protocol-error"},
	{"server closed idle connection", "connection-terminated"},
	{"http2: server sent GOAWAY", "connection-terminated"},
	{"http2: client connection lost", "connection-terminated"},
	{"first record does not look like a TLS handshake", "TLS-protocol-error"},
	{"server gave HTTP response to HTTPS client", "TLS-protocol-error"},
	{"tls: ", "TLS-protocol-error"},
}

// CodeOf returns the error-code for an error of an http.RoundTripper or of a response's body.
func CodeOf(err error) *CodeError {
	if e, ok := errors.AsType[*CodeError](err); ok {
		return e
	}
	if e, ok := errors.AsType[*net.OpError](err); ok && e.Op == "remote error" { // crypto/tls
		alert := &CodeError{Code: "TLS-alert-received", Message: e.Err.Error()}
		if v := reflect.ValueOf(e.Err); v.Kind() == reflect.Uint8 {
			alert.Alert = uint8(v.Uint())
		}
		return alert
	}
	if isCertificateError(err) {
		return &CodeError{Code: "TLS-certificate-error"}
	}
	for _, f := range failures {
		if strings.Contains(err.Error(), f.text) {
			return &CodeError{Code: f.code}
		}
	}
	var protocol textproto.ProtocolError
	var timeout net.Error
	switch {
	case errors.As(err, &protocol):
		return &CodeError{Code: "HTTP-protocol-error"}
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE),
		errors.Is(err, net.ErrClosed):
		return &CodeError{Code: "connection-terminated"}
	case errors.Is(err, context.Canceled):
		return internalError("the request was cancelled")
	case errors.As(err, &timeout) && timeout.Timeout():
		return &CodeError{Code: "connection-timeout"}
	}
	return internalError(err.Error())
}

func isCertificateError(err error) bool {
	var authority x509.UnknownAuthorityError
	var host x509.HostnameError
	var invalid x509.CertificateInvalidError
	var verification *tls.CertificateVerificationError
	return errors.As(err, &authority) || errors.As(err, &host) || errors.As(err, &invalid) || errors.As(err, &verification)
}
