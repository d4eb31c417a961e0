package dataplane

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
)

// isStream reports whether a request body is a stream of messages: any gRPC-Web request, or a stream of Connect.
func isStream(contentType string) bool {
	return strings.HasPrefix(contentType, webContentType) || strings.HasPrefix(contentType, "application/connect+")
}

// HalfDuplex makes a stream over HTTP/1.1 half-duplex: before the response begins, the rest of the request is read
// into memory. Clients of HTTP/1.1 read the response after they have sent the request, and net/http would discard the
// rest. If the rest has more than limit bytes, it is discarded, and reading it fails with RESOURCE_EXHAUSTED. If the
// client does not end its request within wait or its own timeout, it expects full duplex, and the response is 505
// (Connect protocol, "Streaming RPCs").
//
// HalfDuplex returns w and r if r is not a stream over HTTP/1.1.
func HalfDuplex(w http.ResponseWriter, r *http.Request, limit int, wait time.Duration) (http.ResponseWriter, *http.Request) {
	if r.ProtoMajor != 1 || r.Method != http.MethodPost || !isStream(firstValue(r.Header, "Content-Type")) {
		return w, r
	}
	body := &halfDuplexBody{ReadCloser: r.Body}
	r = r.WithContext(r.Context()) // a copy
	r.Body = body
	half := &halfDuplexWriter{body: body, limit: limit, wait: min(wait, clientTimeout(r.Header))}
	half.hookedWriter = hookedWriter{ResponseWriter: w, begin: half.readAhead}
	return half, r
}

// clientTimeout returns the client's timeout for a stream, or the longest duration if there is none or it is invalid.
func clientTimeout(header http.Header) time.Duration {
	if ms, err := strconv.ParseUint(firstValue(header, "Connect-Timeout-Ms"), 10, 32); err == nil {
		return time.Duration(ms) * time.Millisecond
	}
	if timeout, err := parseTimeout(firstValue(header, "Grpc-Timeout")); err == nil && timeout >= 0 {
		return timeout
	}
	return math.MaxInt64
}

// halfDuplexBody reads from the client until the writer reads ahead.
type halfDuplexBody struct {
	io.ReadCloser
	mu    sync.Mutex
	ahead bytes.Buffer // what was read ahead
	err   error        // from the client's last Read; it comes after the bytes in ahead
}

func (b *halfDuplexBody) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ahead.Len() > 0 {
		return b.ahead.Read(p)
	}
	if b.err != nil {
		return 0, b.err
	}
	n, err := b.ReadCloser.Read(p)
	b.err = err
	return n, err
}

// readAhead reads the rest of the body into memory. It returns nil at the end of the body.
func (b *halfDuplexBody) readAhead(limit int) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.err == nil {
		n, err := b.ahead.ReadFrom(io.LimitReader(b.ReadCloser, int64(limit)+1))
		switch {
		case err != nil:
			b.err = err
		case n > int64(limit):
			b.ahead.Truncate(0)
			b.err = connect.NewError(connect.CodeResourceExhausted,
				fmt.Errorf("more than %d bytes of the stream were left when the response began; use HTTP/2 or HTTP/3", limit))
			_, err = io.Copy(io.Discard, b.ReadCloser)
			return err
		default:
			b.err = io.EOF
		}
	}
	if errors.Is(b.err, io.EOF) {
		return nil
	}
	return b.err
}

// halfDuplexWriter reads the body ahead before the response begins.
type halfDuplexWriter struct {
	hookedWriter
	body    *halfDuplexBody
	limit   int
	wait    time.Duration
	refused error // the response is this error, and the handler's response is discarded
}

func (w *halfDuplexWriter) readAhead() {
	control := http.NewResponseController(w.ResponseWriter)
	_ = control.SetReadDeadline(time.Now().Add(w.wait)) // also ends a Read in progress
	err := w.body.readAhead(w.limit)
	if errors.Is(err, os.ErrDeadlineExceeded) { // the deadline stays, or net/http would wait for the rest, too
		w.refuse(fmt.Sprintf("the request did not end within %s; streams in both directions at once need HTTP/2 or HTTP/3", w.wait))
		return
	}
	_ = control.SetReadDeadline(time.Time{})
}

// refuse sends 505 instead of the handler's response.
func (w *halfDuplexWriter) refuse(message string) {
	header := w.Header()
	for name := range header {
		if !strings.HasPrefix(name, "Access-Control-") && name != "Vary" {
			delete(header, name)
		}
	}
	header.Set("Connection", "close") // the client still sends
	http.Error(w.ResponseWriter, message, http.StatusHTTPVersionNotSupported)
	w.refused = errors.New(message)
}

func (w *halfDuplexWriter) WriteHeader(status int) {
	if status >= http.StatusOK { // not informational
		w.start()
	}
	if w.refused == nil {
		w.hookedWriter.WriteHeader(status)
	}
}

func (w *halfDuplexWriter) Write(b []byte) (int, error) {
	w.start()
	if w.refused != nil {
		return 0, w.refused
	}
	return w.hookedWriter.Write(b)
}
