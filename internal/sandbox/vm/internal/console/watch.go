package console

import (
	"sync"

	"github.com/fsnotify/fsnotify"
)

// watcher wakes relays whose serial log has changed. All share one inotify instance, of which a user has few
// (fs.inotify.max_user_instances).
type watcher struct {
	mu     sync.Mutex
	notify *fsnotify.Watcher // there while somebody watches
	wakes  map[string]map[chan struct{}]bool
}

var serialLogs = &watcher{wakes: map[string]map[chan struct{}]bool{}}

// add signals wake whenever the file at path changes.
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
		_ = w.notify.Remove(path) // it may be gone already
	}
	w.release()
}

// release closes inotify when nobody watches.
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
		case _, ok := <-notify.Errors: // too many events at once, say: some were lost
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
