package image

import "sync"

// watchers receive a value when the set of images has changed.
type watchers struct {
	mu  sync.Mutex
	all []chan struct{}
}

func (w *watchers) add() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	changed := make(chan struct{}, 1)
	w.all = append(w.all, changed)
	return changed
}

// notify never blocks.
func (w *watchers) notify() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, changed := range w.all {
		select {
		case changed <- struct{}{}:
		default: // the watcher has not yet received the last one
		}
	}
}

// Changes returns a channel that receives a value after images were recorded or removed, and after the store was opened.
// Changes between two receives are merged into one value. The channel is never closed.
func (s *Store) Changes() <-chan struct{} { return s.watchers.add() }
