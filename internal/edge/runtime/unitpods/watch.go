package unitpods

import (
	"path/filepath"
	"sync"

	"github.com/fsnotify/fsnotify"
)

// watcher wakes followers when their logs change. All followers share one inotify instance, because the kernel limits
// instances per user (fs.inotify.max_user_instances). Followers also poll once a second, so they work without a watch.
type watcher struct {
	mu     sync.Mutex
	notify *fsnotify.Watcher // made by the first add
	wakes  map[string]chan struct{}
	done   sync.WaitGroup
}

func newWatcher() *watcher { return &watcher{wakes: map[string]chan struct{}{}} }

// add makes the watcher send to the given channel whenever a file in the directory changes.
func (w *watcher) add(dir string, wake chan struct{}) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.notify == nil {
		notify, err := fsnotify.NewWatcher()
		if err != nil {
			return err
		}
		w.notify = notify
		w.done.Go(func() { w.run(notify) })
	}
	w.wakes[dir] = wake
	return w.notify.Add(dir)
}

func (w *watcher) remove(dir string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.wakes[dir] == nil {
		return
	}
	delete(w.wakes, dir)
	_ = w.notify.Remove(dir) // fails if the directory was removed
}

func (w *watcher) close() {
	w.mu.Lock()
	if w.notify != nil {
		_ = w.notify.Close()
	}
	w.mu.Unlock()
	w.done.Wait()
}

func (w *watcher) run(notify *fsnotify.Watcher) {
	for {
		select {
		case event, ok := <-notify.Events:
			if !ok {
				return
			}
			w.signal(filepath.Dir(event.Name))
		case _, ok := <-notify.Errors: // such as lost events; followers also poll
			if !ok {
				return
			}
		}
	}
}

func (w *watcher) signal(dir string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if wake := w.wakes[dir]; wake != nil {
		select {
		case wake <- struct{}{}:
		default:
		}
	}
}
