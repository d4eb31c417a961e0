package wasi

import (
	"io"
	"sync"
)

// window is the maximum number of bytes that a stream reads ahead of the guest, or buffers after the guest has written
// them.
const window = 64 << 10

var windows = sync.Pool{New: func() any { return new([window]byte) }}

// Input is the source of an input-stream. Only the guest's thread calls its methods, except Ready.
type Input interface {
	// Next returns up to n available bytes, which are valid until the next call, or no bytes if none are available yet.
	// At the end of the input it returns io.EOF. After any other error, the stream is closed.
	Next(n int) ([]byte, error)
	// Ready reports whether Next would return bytes or an error.
	Ready() bool
	// Begin starts to read in the background. It does nothing if bytes are available.
	Begin()
	// Fill reads immediately, and can block. It does nothing if bytes are available or Begin is reading.
	Fill()
}

// Reader is the Input for a blocking io.Reader. While the guest waits only for this stream, the Reader reads on the
// guest's thread. Otherwise it reads in the background, in at most one goroutine at a time.
type Reader struct {
	from io.Reader
	wake func()

	mu     sync.Mutex
	idle   sync.Cond // on mu; signals that busy has become false
	busy   bool
	window *[window]byte
	unread []byte
	err    error
}

// NewReader makes a Reader, which calls wake after it has read something in the background.
func NewReader(from io.Reader, wake func()) *Reader {
	r := &Reader{from: from, wake: wake}
	r.idle.L = &r.mu
	return r
}

// Next implements Input.
func (r *Reader) Next(n int) ([]byte, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.unread) == 0 {
		return nil, r.err
	}
	next := r.unread[:min(n, len(r.unread))]
	r.unread = r.unread[len(next):]
	return next, nil
}

// Ready implements Input.
func (r *Reader) Ready() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.unread) > 0 || r.err != nil
}

// Begin implements Input.
func (r *Reader) Begin() {
	if r.take() {
		go func() {
			r.read()
			r.wake()
		}()
	}
}

// Fill implements Input.
func (r *Reader) Fill() {
	if r.take() {
		r.read()
	}
}

// take reports whether the caller should read. If so, take marks the Reader as busy.
func (r *Reader) take() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.busy || len(r.unread) > 0 || r.err != nil {
		return false
	}
	r.busy = true
	if r.window == nil {
		r.window = windows.Get().(*[window]byte)
	}
	return true
}

func (r *Reader) read() {
	n, err := r.from.Read(r.window[:])
	for n == 0 && err == nil {
		n, err = r.from.Read(r.window[:])
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.busy, r.unread, r.err = false, r.window[:n], err
	r.idle.Broadcast()
}

// Release ends the Reader and frees its memory. If a read is in progress, Release calls interrupt and waits for the
// read to end. The function interrupt must make the read return.
func (r *Reader) Release(interrupt func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.busy {
		interrupt()
	}
	for r.busy {
		r.idle.Wait()
	}
	if r.window != nil {
		windows.Put(r.window)
		r.window, r.unread = nil, nil
	}
	r.err = io.ErrClosedPipe
}

// Background returns an Input that reads only in the background. A guest's thread that the Reader blocks would not
// notice when the guest's call ends.
func (r *Reader) Background() Input { return background{r} }

// background is a Reader that never blocks the guest's thread.
type background struct{ *Reader }

func (b background) Fill() { b.Begin() }

// Empty is the Input of a stream that is at its end.
type Empty struct{}

// Next implements Input.
func (Empty) Next(int) ([]byte, error) { return nil, io.EOF }

// Ready implements Input.
func (Empty) Ready() bool { return true }

// Begin implements Input.
func (Empty) Begin() {}

// Fill implements Input.
func (Empty) Fill() {}
