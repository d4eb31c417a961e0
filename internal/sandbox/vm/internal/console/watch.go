package console

import (
	"sync"

	"github.com/fsnotify/fsnotify"
)

// watcher wakes relays and hubs when their serial logs change. All relays and hubs share one inotify instance, because
// a user can have only a few instances (fs.inotify.max_user_instances).
type watcher struct {
	mu     sync.Mutex
	notify *fsnotify.Watcher // nil while wakes is empty
	wakes  map[string]map[chan struct{}]bool
}

var serialLogs = &watcher{wakes: map[string]map[chan struct{}]bool{}}

// add makes the watcher signal the channel wake whenever the file at path changes.
func (w *watcher) add(path string, wake chan struct{}) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.notify == nil {
		notify, err := fsnotify.NewWatcher()
		if err != nil {
			return err
		}
		w.notify = notify
		go w.run(notify)
	}
	if w.wakes[path] == nil {
		if err := w.notify.Add(path); err != nil {
			w.release()
			return err
		}
		w.wakes[path] = map[chan struct{}]bool{}
	}
	w.wakes[path][wake] = true
	return nil
}

func (w *watcher) remove(path string, wake chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.wakes[path][wake] {
		return
	}
	delete(w.wakes[path], wake)
	if len(w.wakes[path]) == 0 {
		delete(w.wakes, path)
		_ = w.notify.Remove(path) // the file may be gone
	}
	w.release()
}

// release closes the inotify instance if the map wakes is empty.
func (w *watcher) release() {
	if len(w.wakes) == 0 && w.notify != nil {
		_ = w.notify.Close()
		w.notify = nil
	}
}

func (w *watcher) run(notify *fsnotify.Watcher) {
	for {
		select {
		case event, ok := <-notify.Events:
			if !ok {
				return
			}
			w.signal(event.Name)
		case _, ok := <-notify.Errors: // events may be lost, for example after an overflow
			if !ok {
				return
			}
			w.signalAll()
		}
	}
}

func (w *watcher) signal(path string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for wake := range w.wakes[path] {
		poke(wake)
	}
}

func (w *watcher) signalAll() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, wakes := range w.wakes {
		for wake := range wakes {
			poke(wake)
		}
	}
}

func poke(wake chan struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}
