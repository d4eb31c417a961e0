package wasi

import (
	"io"
	"sync"
)

// window is how much is read ahead of the guest, and written behind it, per stream.
const window = 64 << 10

var windows = sync.Pool{New: func() any { return new([window]byte) }}

// Input is what an input-stream reads from. All but Ready are called by the guest's thread only.
type Input interface {
	// Next gives up to n bytes of those that are there, valid until the next call, or none when there are none yet. The
	// end is io.EOF; after another error the stream is closed.
	Next(n int) ([]byte, error)
	// Ready tells whether Next would give something, be it the end.
	Ready() bool
	// Begin has something read in the background, if nothing is there; Fill does so now, unless Begin is at it, and
	// may block.
	Begin()
	Fill()
}

// Reader is the Input of an io.Reader that blocks. It reads on the guest's thread while the guest only ever waits for
// this stream, and from then on when it does not, in a goroutine at a time.
type Reader struct {
	from io.Reader
	wake func()

	mu     sync.Mutex
	idle   sync.Cond // on mu: busy has become false
	busy   bool
	window *[window]byte
	there  []byte
	err    error
}

// NewReader makes a Reader; wake is called when something has come.
func NewReader(from io.Reader, wake func()) *Reader {
	r := &Reader{from: from, wake: wake}
	r.idle.L = &r.mu
	return r
}

// Next is documented at Input.
func (r *Reader) Next(n int) ([]byte, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.there) == 0 {
		return nil, r.err
	}
	next := r.there[:min(n, len(r.there))]
	r.there = r.there[len(next):]
	return next, nil
}

// Ready is documented at Input.
func (r *Reader) Ready() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.there) > 0 || r.err != nil
}

// Begin is documented at Input.
func (r *Reader) Begin() {
	if r.take() {
		go func() {
			r.read()
			r.wake()
		}()
	}
}

// Fill is documented at Input.
func (r *Reader) Fill() {
	if r.take() {
		r.read()
	}
}

// take makes the caller the one who reads, if that is needed.
func (r *Reader) take() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.busy || len(r.there) > 0 || r.err != nil {
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
	r.busy, r.there, r.err = false, r.window[:n], err
	r.idle.Broadcast()
}

// Release ends the Reader and gives its memory back. When a goroutine reads it has from interrupted, by interrupt, and
// waits for it.
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
		r.window, r.there = nil, nil
	}
	r.err = io.ErrClosedPipe
}

// Empty is the Input of a stream that is at its end.
type Empty struct{}

// Next is documented at Input, as are the others.
func (Empty) Next(int) ([]byte, error) { return nil, io.EOF }

// Ready says yes.
func (Empty) Ready() bool { return true }

// Begin does nothing.
func (Empty) Begin() {}

// Fill does nothing.
func (Empty) Fill() {}
