package h2

import (
	"bytes"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// pendingMax is how much of a body waits for the end of the handler, in bytes, so that its length can be sent.
const pendingMax = 4 << 10

// flushAt is how much of a body is sent without a Flush, in bytes.
const flushAt = 16 << 10

// response is an http.ResponseWriter. Its header belongs to the handler; conn.mu guards the rest that other goroutines
// use. It implements http.Flusher and the methods of http.ResponseController.
type response struct {
	stream *stream
	header http.Header

	status    int         // 0 before WriteHeader
	fixed     http.Header // the header at WriteHeader, until it is sent
	sent      bool        // the header has been sent
	announced []string    // fields of the trailer
	length    int64       // the Content-Length, or -1
	written   int64       // bytes of the body
	pending   []byte      // of the body, before the header has been sent
	unflushed int         // bytes sent since the last flush
}

// Header implements http.ResponseWriter.
func (w *response) Header() http.Header {
	if w.header == nil {
		w.header = http.Header{}
	}
	return w.header
}

// WriteHeader implements http.ResponseWriter.
func (w *response) WriteHeader(status int) {
	switch {
	case status < 100 || status > 999 || status == http.StatusSwitchingProtocols: // which HTTP/2 does not have (RFC 9113, 8.6)
		panic("invalid status " + strconv.Itoa(status)) // as in net/http
	case w.status != 0:
		return
	case status < 200:
		w.informational(status)
		return
	}
	w.begin(status)
	w.fixed = w.Header().Clone()
}

// informational sends a response of the class 1xx.
func (w *response) informational(status int) {
	c := w.stream.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if status == http.StatusContinue {
		if !w.stream.expects {
			return
		}
		w.stream.expects = false
	}
	w.stream.writeHeaders(status, w.Header(), false, "Content-Length")
	c.flush()
}

// begin fixes the status and the length of the response.
func (w *response) begin(status int) {
	w.status, w.length = status, -1
	header := w.Header()
	if values := header["Content-Length"]; len(values) > 0 {
		n, err := strconv.ParseUint(values[0], 10, 63)
		if err != nil {
			delete(header, "Content-Length")
			return
		}
		w.length = int64(n)
	}
}

func (w *response) isHead() bool { return w.stream.request.Method == http.MethodHead }

// hasBody reports whether responses of the status have a body.
func (w *response) hasBody() bool {
	return w.status >= 200 && w.status != http.StatusNoContent && w.status != http.StatusNotModified
}

// isGRPC reports whether the response is gRPC, which needs neither a Content-Length nor the body to find its type.
func isGRPC(header http.Header) bool {
	values := header["Content-Type"]
	return len(values) > 0 && strings.HasPrefix(values[0], "application/grpc")
}

// Write implements http.ResponseWriter.
func (w *response) Write(p []byte) (int, error) {
	if w.status == 0 {
		w.begin(http.StatusOK)
		if !isGRPC(w.Header()) {
			w.fixed = w.Header().Clone()
		}
	}
	if !w.hasBody() {
		return 0, http.ErrBodyNotAllowed
	}
	if w.written += int64(len(p)); w.length >= 0 && w.written > w.length {
		return 0, http.ErrContentLength
	}
	if w.isHead() || len(p) == 0 {
		return len(p), nil
	}
	c := w.stream.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if !w.sent && w.fixed != nil && len(w.pending)+len(p) <= pendingMax {
		w.pending = append(w.pending, p...)
		return len(p), nil
	}
	w.send(p)
	if err := w.stream.send(p); err != nil {
		return 0, err
	}
	if w.unflushed += len(p); w.unflushed >= flushAt {
		w.unflushed = 0
		c.flush()
	}
	return len(p), nil
}

// send sends the header, if it has not been sent, and what is pending. next is the next part of the body.
func (w *response) send(next []byte) {
	if w.sent {
		return
	}
	pending := w.pending
	w.pending = nil
	if len(pending) > 0 {
		next = pending
	}
	w.sendHeader(next, false)
	_ = w.stream.send(pending) // fails if the stream has ended, and so will what follows
}

// sendHeader sends the header. body is the body's beginning, from which its type is found if it has none.
func (w *response) sendHeader(body []byte, end bool) {
	header := w.fixed
	if header == nil {
		header = w.Header()
	}
	w.sent, w.fixed, w.stream.expects = true, nil, false
	for _, list := range header["Trailer"] {
		for name := range strings.SplitSeq(list, ",") {
			if name = http.CanonicalHeaderKey(strings.TrimSpace(name)); httpguts.ValidTrailerHeader(name) {
				w.announced = append(w.announced, name)
			}
		}
	}
	if _, ok := header["Content-Type"]; !ok && len(body) > 0 && w.hasBody() && len(header["Content-Encoding"]) == 0 {
		header["Content-Type"] = []string{http.DetectContentType(body)}
	}
	if _, ok := header["Date"]; !ok {
		header["Date"] = []string{w.stream.conn.server.dateNow()}
	}
	w.stream.writeHeaders(w.status, header, end, w.announced...)
	if strings.EqualFold(header.Get("Connection"), "close") {
		w.stream.conn.drainLocked()
	}
}

// WriteString implements io.StringWriter.
func (w *response) WriteString(s string) (int, error) { return w.Write([]byte(s)) }

// Flush implements http.Flusher.
func (w *response) Flush() { _ = w.FlushError() }

// FlushError sends what has been written. It fails if the stream has ended.
func (w *response) FlushError() error {
	if w.status == 0 {
		w.begin(http.StatusOK)
	}
	c := w.stream.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := w.stream.ending(); err != nil {
		return err
	}
	w.send(nil)
	w.unflushed = 0
	c.flush()
	return nil
}

// SetReadDeadline ends reads of the request's body at the time t.
func (w *response) SetReadDeadline(t time.Time) error {
	w.stream.setReadDeadline(t)
	return nil
}

// SetWriteDeadline resets the stream at the time t.
func (w *response) SetWriteDeadline(t time.Time) error {
	w.stream.setWriteDeadline(t)
	return nil
}

// EnableFullDuplex does nothing: reads and writes are always independent.
func (w *response) EnableFullDuplex() error { return nil }

var errShort = errors.New("the handler has written less than its Content-Length")

// finish ends the response after its handler. conn.mu is held.
func (st *stream) finish() {
	w, c := &st.response, st.conn
	if !st.isOpen() {
		return
	}
	if w.status == 0 {
		w.begin(http.StatusOK)
	}
	if w.length >= 0 && w.written < w.length && w.hasBody() && !w.isHead() {
		st.reset(http2.ErrCodeInternal, errShort)
		return
	}
	ended := !w.sent && st.finishUnsent()
	switch trailer := w.trailer(); {
	case !st.isOpen():
		return
	case ended:
	case len(trailer) > 0:
		st.writeHeaders(0, trailer, true)
	default:
		c.endData(st)
	}
	if !st.ended { // nobody reads the rest of the request
		st.reset(http2.ErrCodeNo, nil)
		return
	}
	st.end(nil)
}

// finishUnsent sends the header and the body of a response whose handler has ended before. It reports whether the header
// was everything.
func (st *stream) finishUnsent() (ended bool) {
	w := &st.response
	header := w.fixed
	if header == nil {
		header = w.Header()
	}
	if w.length < 0 && w.hasBody() && (w.written > 0 || !w.isHead()) && !isGRPC(header) {
		header["Content-Length"] = []string{strconv.FormatInt(w.written, 10)}
	}
	body := w.pending
	ended = len(body) == 0 && len(w.trailer()) == 0 && len(header["Trailer"]) == 0
	w.sendHeader(body, ended)
	_ = st.send(body) // fails if the stream has ended
	return ended
}

// trailer returns the response's trailer: the announced fields, and those with http.TrailerPrefix.
func (w *response) trailer() http.Header {
	var trailer http.Header
	add := func(name string, values []string) {
		if trailer == nil {
			trailer = make(http.Header, 4)
		}
		trailer[name] = values
	}
	for _, name := range w.announced {
		if values := w.header[name]; len(values) > 0 {
			add(name, values)
		}
	}
	for key, values := range w.header {
		if name, ok := strings.CutPrefix(key, http.TrailerPrefix); ok && httpguts.ValidTrailerHeader(name) {
			add(http.CanonicalHeaderKey(name), values)
		}
	}
	return trailer
}

// writeHeaders writes HEADERS frames: the status, if it is not 0, and the valid fields but those that are left out.
func (st *stream) writeHeaders(status int, header http.Header, end bool, without ...string) {
	c := st.conn
	if !st.isOpen() {
		return
	}
	c.encoded.Reset()
	if status == http.StatusOK && !c.tableChanged {
		c.encoded.WriteByte(0x88) // ":status: 200" (RFC 7541, appendix A), without a search
	} else if status != 0 {
		c.encode(":status", strconv.Itoa(status))
	}
	c.tableChanged = false
fields:
	for key, values := range header {
		name := lower(key)
		if isConnectionSpecific(name) || !validName(name) { // http.TrailerPrefix makes names invalid
			continue
		}
		for _, left := range without {
			if key == left {
				continue fields
			}
		}
		for _, v := range values {
			if httpguts.ValidHeaderFieldValue(v) {
				c.encode(name, v)
			}
		}
	}
	b := c.encoded.Bytes()
	first := b[:min(len(b), c.frameSize)]
	b = b[len(first):]
	_ = c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: st.id, BlockFragment: first, EndStream: end, EndHeaders: len(b) == 0})
	for len(b) > 0 {
		next := b[:min(len(b), c.frameSize)]
		b = b[len(next):]
		_ = c.framer.WriteContinuation(st.id, len(b) == 0, next)
	}
	if c.encoded.Cap() > maxFrame { // keep no large buffer
		c.encoded = bytes.Buffer{}
	}
}

func (c *conn) encode(name, value string) {
	_ = c.encoder.WriteField(hpack.HeaderField{Name: name, Value: value})
}

// isConnectionSpecific reports whether HTTP/2 has no place for a field (RFC 9113, 8.2.2).
func isConnectionSpecific(name string) bool {
	switch name {
	case "connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade":
		return true
	}
	return false
}
