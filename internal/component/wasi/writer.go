package wasi

import (
	"io"
	"sync"
	"time"
)

// Output is the destination of an output-stream. Only the guest's thread calls its methods, except Room, Busy and Idle.
type Output interface {
	// Room returns the number of bytes that Write accepts now. It returns an error if Write will never accept bytes
	// again. The error is io.ErrClosedPipe if the stream was closed normally.
	Room() (int, error)
	// Write writes p without blocking. p must not be longer than the result of Room.
	Write(p []byte) error
	// Flush starts sending the written bytes in the background.
	Flush()
	// Busy reports whether background work is in progress.
	Busy() bool
	// Idle reports whether no bytes are pending, and no background work is in progress. It also reports true after an
	// error.
	Idle() bool
	// Through writes the pending bytes and then p, and can block. If background work is in progress, Through does
	// nothing and returns false.
	Through(p []byte) (done bool, err error)
}

// flushDelay is how long written or flushed bytes wait for more bytes, so that one packet can carry both.
const flushDelay = time.Millisecond

// Writer adapts a blocking io.Writer to Output. If the guest waits for a write, that write runs on the guest's thread.
// Other writes run in the background, in at most one goroutine at a time.
type Writer struct {
	to io.Writer
	// send flushes the io.Writer above. It is called some time after Write or Flush, and never during a write.
	send func() error
	wake func()

	mu      sync.Mutex
	idle    sync.Cond // on mu; signals that busy has become false
	busy    bool      // a goroutine or the guest's thread is writing or sending
	closed  bool
	pending []byte
	unsent  bool // bytes were written or flushed since the last send
	timer   *time.Timer
	err     error
}

// NewWriter makes a Writer, which calls wake after it has written something in the background. Nothing runs in the
// background after Close.
func NewWriter(to io.Writer, send func() error, wake func()) *Writer {
	w := &Writer{to: to, send: send, wake: wake}
	w.idle.L = &w.mu
	return w
}

// Room implements Output.
func (w *Writer) Room() (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return max(0, window-len(w.pending)), w.err
}

// Write implements Output.
func (w *Writer) Write(p []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return w.err
	}
	w.pending = append(w.pending, p...)
	switch {
	case len(w.pending) > window/2:
		w.begin()
	case len(p) > 0:
		w.sendSoon() // guests that copy a stream do not flush, and wait for an answer
	}
	return nil
}

// Flush implements Output.
func (w *Writer) Flush() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.unsent = true
	if len(w.pending) > 0 {
		w.begin()
	} else if w.send != nil {
		w.sendSoon()
	}
}

// begin starts to write the pending bytes in the background. The caller holds the lock.
func (w *Writer) begin() {
	if w.busy || w.err != nil {
		return
	}
	w.busy = true
	go func() {
		w.drain(nil)
		w.wake()
	}()
}

// drain writes the pending bytes, and then the given bytes. The caller has set busy. The last step makes busy false.
func (w *Writer) drain(last []byte) {
	for {
		w.mu.Lock()
		next := w.pending
		w.pending = nil
		if len(next) == 0 {
			next, last = last, nil
		}
		if len(next) == 0 || w.err != nil {
			w.busy = false
			if w.send == nil {
				w.unsent = false
			} else if w.unsent {
				w.sendSoon()
			}
			w.idle.Broadcast()
			w.mu.Unlock()
			return
		}
		w.mu.Unlock()
		w.write(next)
	}
}

// writePending writes the pending bytes. The caller has set busy, which stays true.
func (w *Writer) writePending() {
	for {
		w.mu.Lock()
		next, failed := w.pending, w.err != nil
		w.pending = nil
		w.mu.Unlock()
		if len(next) == 0 || failed {
			return
		}
		w.write(next)
	}
}

func (w *Writer) write(p []byte) {
	if _, err := w.to.Write(p); err != nil {
		w.Fail(err)
	}
}

// Fail makes the stream end with err, unless it has already ended.
func (w *Writer) Fail(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == nil {
		w.err = err
	}
}

// sendSoon starts the timer that writes what is pending then, and calls send. The caller holds the lock.
func (w *Writer) sendSoon() {
	w.unsent = true
	if w.timer == nil && w.err == nil && !w.closed {
		w.timer = time.AfterFunc(flushDelay, w.sendNow)
	}
}

func (w *Writer) sendNow() {
	w.mu.Lock()
	w.timer = nil
	if w.busy || w.err != nil || w.closed || !w.unsent { // if busy, drain calls sendSoon later
		w.mu.Unlock()
		return
	}
	w.busy, w.unsent = true, false
	w.mu.Unlock()
	w.writePending()
	if w.send != nil {
		if err := w.send(); err != nil {
			w.Fail(err)
		}
	}
	w.drain(nil)
	w.wake()
}

// Busy implements Output.
func (w *Writer) Busy() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.busy
}

// Idle implements Output.
func (w *Writer) Idle() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return !w.busy && (len(w.pending) == 0 || w.err != nil)
}

// Through implements Output.
func (w *Writer) Through(p []byte) (bool, error) {
	w.mu.Lock()
	if w.busy || w.err != nil {
		defer w.mu.Unlock()
		return w.err != nil, w.err
	}
	w.busy, w.unsent = true, true
	w.mu.Unlock()
	w.drain(p)
	w.mu.Lock()
	defer w.mu.Unlock()
	return true, w.err
}

// Close waits for background work, writes the pending bytes and ends the Writer. It returns the Writer's error, if any.
func (w *Writer) Close() error {
	w.mu.Lock()
	w.closed = true
	if w.timer != nil {
		w.timer.Stop()
		w.timer = nil
	}
	for w.busy {
		w.idle.Wait()
	}
	w.busy, w.unsent = true, false
	w.mu.Unlock()
	w.drain(nil)
	w.mu.Lock()
	defer w.mu.Unlock()
	err := w.err
	w.err = io.ErrClosedPipe
	return err
}

// Background returns an Output that writes only in the background. A guest's thread that the Writer blocks would not
// notice when the guest's call ends.
func (w *Writer) Background() Output { return &backgroundOutput{Writer: w} }

type backgroundOutput struct {
	*Writer
	begun bool // Through has passed its bytes to the Writer
}

// Through implements Output. It returns false until the background work has written the bytes.
func (b *backgroundOutput) Through(p []byte) (bool, error) {
	if !b.begun {
		if err := b.Write(p); err != nil {
			return true, err
		}
		b.begun = true
		b.Flush()
	}
	idle := b.Idle()
	_, err := b.Room() // after Idle, which is true after an error, too
	if !idle && err == nil {
		return false, nil
	}
	b.begun = false
	return true, err
}

// direct is the Output for an io.Writer whose writes never block for long, such as a log or a file.
type direct struct{ io.Writer }

func (d direct) Room() (int, error) { return window, nil }

func (d direct) Write(p []byte) error {
	_, err := d.Writer.Write(p)
	return err
}

func (d direct) Flush()     {}
func (d direct) Busy() bool { return false }
func (d direct) Idle() bool { return true }

func (d direct) Through(p []byte) (bool, error) { return true, d.Write(p) }
