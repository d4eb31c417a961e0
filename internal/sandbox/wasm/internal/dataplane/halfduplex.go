package dataplane

import (
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
func isStream(media string) bool {
	return strings.HasPrefix(media, webContentType) || strings.HasPrefix(media, "application/connect+")
}

// Ahead bounds what HalfDuplex reads before a response begins.
type Ahead struct {
	// Bytes bounds the rest of one request.
	Bytes int
	// Wait bounds the wait for the end of the request.
	Wait time.Duration
	// Memory is charged for what is kept.
	Memory Memory
	// Refuse says what happens if the rest exceeds Bytes or Memory: the response is 505 if Refuse is true. Otherwise,
	// reading the rest fails with RESOURCE_EXHAUSTED.
	Refuse bool
}

// Memory is an amount of memory, in bytes, that requests share. *semaphore.Weighted implements it.
type Memory interface {
	// TryAcquire takes n bytes. If there are fewer, it takes none and returns false.
	TryAcquire(n int64) bool
	// Release gives back n bytes.
	Release(n int64)
}

// AheadMemory is the memory, in bytes, that a process keeps for the rests of half-duplex streams.
const AheadMemory = 64 << 20

// HalfDuplex makes a stream over HTTP/1.1 half-duplex: before the response begins, the rest of the request is read
// into memory. Clients of HTTP/1.1 read the response after they have sent the request, and net/http would discard the
// rest. If the rest exceeds the limits, or nobody will read it, it is discarded. Nobody will read it once the returned
// request's body is closed, or if the status of the response is not 2xx. If the client does not end its request within
// a.Wait or its own timeout, it expects full duplex, and the response is 505 (Connect protocol, "Streaming RPCs").
//
// done says that nobody will read the request any more. Call it at the latest when the handler returns. HalfDuplex returns w and
// r if r is not a stream over HTTP/1.1.
func HalfDuplex(w http.ResponseWriter, r *http.Request, a Ahead) (_ http.ResponseWriter, _ *http.Request, done func()) {
	if r.ProtoMajor != 1 || r.Method != http.MethodPost || !isStream(MediaType(r.Header)) {
		return w, r, func() {}
	}
	a.Wait = min(a.Wait, clientTimeout(r.Header))
	body := &halfDuplexBody{client: r.Body, limits: a}
	r = r.WithContext(r.Context()) // a copy
	r.Body = body
	half := &halfDuplexWriter{body: body, control: http.NewResponseController(w)}
	half.hookedWriter = hookedWriter{ResponseWriter: w, begin: half.readAhead}
	return half, r, half.done
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

// chunkSize is the size, in bytes, of the pieces in which the rest of a body is kept.
const chunkSize = 16 << 10

// halfDuplexBody reads from the client until the writer reads ahead.
type halfDuplexBody struct {
	client  io.ReadCloser
	limits  Ahead
	reading sync.Mutex // held while client is read

	mu    sync.Mutex
	ahead [][]byte // chunks that were read ahead, each with chunkSize bytes of memory; the first one is partly read
	size  int      // bytes that were read ahead
	err   error    // comes after the bytes in ahead
	ended error    // what later Reads return, because nobody will read any more; nil before that
}

func (b *halfDuplexBody) Read(p []byte) (int, error) {
	b.reading.Lock()
	defer b.reading.Unlock()
	if n, err := b.readKept(p); n > 0 || err != nil || len(p) == 0 {
		return n, err
	}
	n, err := b.client.Read(p)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ended == nil || !errors.Is(err, os.ErrDeadlineExceeded) { // an interrupted Read says nothing about the client
		b.err = err
	}
	return n, err
}

// readKept reads what was read ahead. It returns 0 and nil if the client must be read.
func (b *halfDuplexBody) readKept(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ended != nil {
		return 0, b.ended
	}
	if len(b.ahead) == 0 {
		return 0, b.err
	}
	n := copy(p, b.ahead[0])
	if b.ahead[0] = b.ahead[0][n:]; len(b.ahead[0]) == 0 {
		b.ahead[0] = nil // for the garbage collector
		b.ahead = b.ahead[1:]
		b.limits.Memory.Release(chunkSize)
	}
	return n, nil
}

// Close implements io.Closer: nobody will read any more. It does not wait for a Read, and it leaves the client's body to
// net/http, which closes it at the end of the request.
func (b *halfDuplexBody) Close() error {
	b.end(http.ErrBodyReadAfterClose)
	return nil
}

// end makes all later Reads fail with err.
func (b *halfDuplexBody) end(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ended == nil {
		b.ended = err
	}
	b.drop()
}

// drop releases what was read ahead.
func (b *halfDuplexBody) drop() {
	b.limits.Memory.Release(int64(len(b.ahead)) * chunkSize)
	b.ahead = nil
}

// readAhead reads the rest of the body. It returns nil at the end of the body.
func (b *halfDuplexBody) readAhead() error {
	b.reading.Lock()
	defer b.reading.Unlock()
	b.mu.Lock()
	err := b.err
	b.mu.Unlock()
	for err == nil && b.reserve() {
		chunk, n := make([]byte, chunkSize), 0
		for n < len(chunk) && err == nil {
			var read int
			read, err = b.client.Read(chunk[n:])
			n += read
		}
		b.keep(chunk[:n], err)
	}
	if err == nil {
		_, err = io.Copy(io.Discard, b.client)
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// reserve reserves the memory for a chunk. It returns false if the rest of the body is to be discarded.
func (b *halfDuplexBody) reserve() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.ended != nil:
		return false
	case b.size > b.limits.Bytes:
		b.err = tooLong(fmt.Sprintf("more than %d bytes", b.limits.Bytes))
	case !b.limits.Memory.TryAcquire(chunkSize):
		b.err = tooLong("more than there is memory for")
	default:
		return true
	}
	b.drop()
	return false
}

// keep keeps a chunk whose memory is reserved, and the error that comes after it.
func (b *halfDuplexBody) keep(chunk []byte, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.err = err
	b.size += len(chunk)
	if b.ended != nil || len(chunk) == 0 {
		b.limits.Memory.Release(chunkSize)
		return
	}
	b.ahead = append(b.ahead, chunk)
}

// tooLong returns the error for a rest that is not kept.
func tooLong(what string) error {
	return connect.NewError(connect.CodeResourceExhausted,
		fmt.Errorf("%s of the stream were left when the response began; use HTTP/2 or HTTP/3", what))
}

// refusal returns the reason to refuse the request because its rest was not kept, or "".
func (b *halfDuplexBody) refusal() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	over, ok := errors.AsType[*connect.Error](b.err)
	if !ok || b.ended != nil || !b.limits.Refuse {
		return ""
	}
	return over.Message()
}

// halfDuplexWriter reads the body ahead before the response begins.
type halfDuplexWriter struct {
	hookedWriter
	body    *halfDuplexBody
	control *http.ResponseController // of the client's connection
	refused error                    // the response is this error, and the handler's response is discarded

	mu          sync.Mutex
	phase       int           // of the response
	interrupted bool          // the connection had a read deadline before the response began
	limited     bool          // the connection has a write deadline
	grace       time.Duration // for writes after the response has begun; 0 means no limit
}

// The phases of a response.
const (
	phaseRequest = iota // it has not begun
	phaseAhead          // the body is read ahead
	phaseResponse
)

// SetReadDeadline ends the handler's reads. It does not shorten the wait for the end of the request: a client of HTTP/1.1
// does not read the response before that. The only deadline is the present.
func (w *halfDuplexWriter) SetReadDeadline(t time.Time) error {
	w.body.end(os.ErrDeadlineExceeded)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.phase != phaseRequest {
		return nil
	}
	w.interrupted = true
	return w.control.SetReadDeadline(t) // ends a Read in progress
}

// SetWriteDeadline limits writes. Until the response begins, its time does not pass.
func (w *halfDuplexWriter) SetWriteDeadline(t time.Time) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.phase != phaseResponse {
		w.grace = time.Until(t)
		return nil
	}
	w.limited = true
	return w.control.SetWriteDeadline(t)
}

// done says that nobody will read the request any more.
func (w *halfDuplexWriter) done() {
	_ = w.body.Close()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.limited { // the connection's next request has its own deadline
		_ = w.control.SetWriteDeadline(time.Time{})
	}
}

func (w *halfDuplexWriter) readAhead() {
	wait := w.body.limits.Wait
	until := time.Now().Add(wait)
	w.mu.Lock()
	w.phase = phaseAhead
	_ = w.control.SetReadDeadline(until) // also ends a Read in progress
	w.mu.Unlock()
	err := w.body.readAhead()
	w.beginResponse()
	// An earlier error is that of an interrupted Read, which net/http keeps for the rest of a chunked body.
	timedOut := errors.Is(err, os.ErrDeadlineExceeded) && !time.Now().Before(until)
	if timedOut { // the deadline stays, or net/http would wait for the rest, too
		w.refuse(fmt.Sprintf("the request did not end within %s; streams in both directions at once need HTTP/2 or HTTP/3", wait))
		return
	}
	_ = w.control.SetReadDeadline(time.Time{})
	if reason := w.body.refusal(); reason != "" {
		w.refuse(reason)
	}
}

// beginResponse applies the limit for writes, and ends the connection after an interruption.
func (w *halfDuplexWriter) beginResponse() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.phase = phaseResponse
	if w.interrupted { // net/http has cancelled the connection's context, and with it that of further requests
		w.Header().Set("Connection", "close")
	}
	if w.grace > 0 {
		w.limited = true
		_ = w.control.SetWriteDeadline(time.Now().Add(w.grace))
	}
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
	header.Set("Content-Type", "text/plain; charset=utf-8")
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Content-Length", strconv.Itoa(len(message)+1))
	w.ResponseWriter.WriteHeader(http.StatusHTTPVersionNotSupported)
	_, _ = io.WriteString(w.ResponseWriter, message+"\n") // the client is gone if this fails
	_ = w.control.Flush()                                 // now, because the handler can abort the connection
	w.refused = errors.New(message)
}

func (w *halfDuplexWriter) WriteHeader(status int) {
	if status >= http.StatusMultipleChoices {
		_ = w.body.Close()
	}
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
