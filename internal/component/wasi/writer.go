package wasi

import (
	"io"
	"sync"
	"time"
)

// Output is what an output-stream writes to. It is used by the guest's thread only, but for Room and Idle.
type Output interface {
	// Room is how many bytes Write takes now; an error when it will never take any more, io.ErrClosedPipe for a stream
	// that has been closed in order.
	Room() (int, error)
	// Write takes p, which is no longer than Room. It does not block.
	Write(p []byte) error
	// Flush has what was written go its way, in the background.
	Flush()
	// Idle tells whether all that was written and flushed has gone, or an error is to be told.
	Idle() bool
	// Through writes p after all that was written before, and may block. It does nothing and returns false when the
	// Output is not Idle.
	Through(p []byte) (done bool, err error)
}

// flushDelay is how long flushed bytes may wait for more of them before they are sent as a packet of their own.
const flushDelay = time.Millisecond

// Writer is the Output of an io.Writer that blocks. What the guest waits for is written on its own thread, the rest by a
// goroutine at a time.
type Writer struct {
	to io.Writer
	// send makes what is written to to leave; it is called some time after Flush, never during a write.
	send func() error
	wake func()

	mu      sync.Mutex
	idle    sync.Cond // on mu: busy has become false
	busy    bool      // somebody writes or sends
	closed  bool
	pending []byte
	unsent  bool // bytes were written since the last send, and a flush was asked for
	timer   *time.Timer
	err     error
}

// NewWriter makes a Writer; wake is called when something has been written. Nothing happens in the background after its
// Close.
func NewWriter(to io.Writer, send func() error, wake func()) *Writer {
	w := &Writer{to: to, send: send, wake: wake}
	w.idle.L = &w.mu
	return w
}

// Room is documented at Output.
func (w *Writer) Room() (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return max(0, window-len(w.pending)), w.err
}

// Write is documented at Output.
func (w *Writer) Write(p []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return w.err
	}
	w.pending = append(w.pending, p...)
	if len(w.pending) > window/2 {
		w.begin()
	}
	return nil
}

// Flush is documented at Output.
func (w *Writer) Flush() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.unsent = true
	if len(w.pending) > 0 {
		w.begin()
	} else {
		w.sendSoon()
	}
}

// begin has what is pending written in the background. The lock is held.
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

// drain writes what is pending, and then last. The caller has made the Writer busy.
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
			if w.unsent {
				w.sendSoon()
			}
			w.idle.Broadcast()
			w.mu.Unlock()
			return
		}
		w.mu.Unlock()
		if _, err := w.to.Write(next); err != nil {
			w.Fail(err)
		}
	}
}

// Fail has the stream end with err, unless it has ended already.
func (w *Writer) Fail(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == nil {
		w.err = err
	}
}

// sendSoon arms the timer of send. The lock is held.
func (w *Writer) sendSoon() {
	if w.timer == nil && w.send != nil && w.err == nil && !w.closed {
		w.timer = time.AfterFunc(flushDelay, w.sendNow)
	}
}

func (w *Writer) sendNow() {
	w.mu.Lock()
	w.timer = nil
	if w.busy || w.err != nil || w.closed || !w.unsent { // who is busy sees to it afterwards
		w.mu.Unlock()
		return
	}
	w.busy, w.unsent = true, false
	w.mu.Unlock()
	if err := w.send(); err != nil {
		w.Fail(err)
	}
	w.drain(nil)
	w.wake()
}

// Idle is documented at Output.
func (w *Writer) Idle() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return !w.busy && (len(w.pending) == 0 || w.err != nil)
}

// Through is documented at Output.
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

// Close writes what is pending, takes no more, and returns the error that the stream met, if any. It waits for what goes on in
// the background.
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

// direct is the Output of an io.Writer that takes everything at once: a log, a file.
type direct struct{ io.Writer }

func (d direct) Room() (int, error) { return window, nil }

func (d direct) Write(p []byte) error {
	_, err := d.Writer.Write(p)
	return err
}

func (d direct) Flush()     {}
func (d direct) Idle() bool { return true }

func (d direct) Through(p []byte) (bool, error) { return true, d.Write(p) }
