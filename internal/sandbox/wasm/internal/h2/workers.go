package h2

import (
	"sync"
	"time"
)

// workers are goroutines that run the handlers of requests. They are kept for a while, because the stack of a new goroutine
// has to grow, which is a fifth of the server's time for a small call.
type workers struct {
	mu    sync.Mutex
	idle  []chan *stream // the one that is idle for the longest time first
	least int            // how many were idle at any time since the last tick
	timer *time.Timer    // calls tick while workers are idle
}

// workerIdle is the time between ticks.
const workerIdle = time.Second

// run calls the handler of a stream in a worker.
func (w *workers) run(st *stream) {
	w.mu.Lock()
	n := len(w.idle) - 1
	if n < 0 {
		w.mu.Unlock()
		go w.work(st)
		return
	}
	next := w.idle[n]
	w.idle = w.idle[:n]
	w.least = min(w.least, n)
	w.mu.Unlock()
	next <- st
}

func (w *workers) work(st *stream) {
	for next := make(chan *stream, 1); st != nil; st = <-next {
		st.run()
		w.mu.Lock()
		w.idle = append(w.idle, next)
		if w.timer == nil {
			w.timer = time.AfterFunc(workerIdle, w.tick)
		}
		w.mu.Unlock()
	}
}

// tick ends the workers that nobody has needed since the last tick.
func (w *workers) tick() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, next := range w.idle[:w.least] {
		next <- nil
	}
	w.idle = append([]chan *stream(nil), w.idle[w.least:]...)
	if w.least = len(w.idle); w.least == 0 {
		w.timer = nil
		return
	}
	w.timer.Reset(workerIdle)
}
