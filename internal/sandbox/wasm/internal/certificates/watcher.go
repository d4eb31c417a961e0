package certificates

import (
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
)

// settleTime is how long a certificate's directory must stay unchanged before the certificate is read again. An editor
// can write a file in several steps, and the daemon must not read it in between.
const settleTime = 200 * time.Millisecond

// Watcher reports changes to the certificate files of running containers. All containers share one inotify
// instance, because the kernel allows each user only a few (fs.inotify.max_user_instances).
type Watcher struct {
	// Changed is called when the files of a container may have changed. It is set before the first call of Follow.
	Changed func(id string)

	log    *slog.Logger
	notify *fsnotify.Watcher
	done   chan struct{}

	mu     sync.Mutex
	dirs   map[string]map[string]bool // containers by directory
	dirOf  map[string]string          // directory by container
	timers map[string]*time.Timer     // by directory
}

// NewWatcher returns a watcher of no files. The caller must call Close.
func NewWatcher(log *slog.Logger) (*Watcher, error) {
	notify, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	w := &Watcher{
		log: log, notify: notify, done: make(chan struct{}),
		dirs: map[string]map[string]bool{}, dirOf: map[string]string{}, timers: map[string]*time.Timer{},
	}
	go w.run()
	return w, nil
}

// Close ends the watcher.
func (w *Watcher) Close() {
	_ = w.notify.Close()
	<-w.done
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, t := range w.timers {
		t.Stop()
	}
}

// Follow watches the directory of a container's certificate.
func (w *Watcher) Follow(id, dir string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.dirs[dir] == nil {
		if err := w.notify.Add(dir); err != nil {
			w.log.Warn("watch certificate failed", "container", id, "dir", dir, "err", err)
			return
		}
		w.dirs[dir] = map[string]bool{}
	}
	w.dirs[dir][id], w.dirOf[id] = true, dir
}

// Forget stops watching the certificate of a container.
func (w *Watcher) Forget(id string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	dir, ok := w.dirOf[id]
	if !ok {
		return
	}
	delete(w.dirOf, id)
	delete(w.dirs[dir], id)
	if len(w.dirs[dir]) == 0 {
		delete(w.dirs, dir)
		_ = w.notify.Remove(dir) // fails if the directory was removed
	}
}

func (w *Watcher) run() {
	defer close(w.done)
	for {
		select {
		case e, ok := <-w.notify.Events:
			if !ok {
				return
			}
			w.postpone(e.Name)
		case err, ok := <-w.notify.Errors:
			if !ok {
				return
			}
			w.log.Warn("watch certificates failed", "err", err)
		}
	}
}

// postpone schedules a report about the directory of a changed file. Further changes postpone the report, until the
// directory has been unchanged for settleTime.
func (w *Watcher) postpone(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for dir := range w.dirs {
		if name != dir && !strings.HasPrefix(name, dir+"/") {
			continue
		}
		if t := w.timers[dir]; t != nil {
			t.Reset(settleTime)
			continue
		}
		w.timers[dir] = time.AfterFunc(settleTime, func() { w.report(dir) })
	}
}

func (w *Watcher) report(dir string) {
	w.mu.Lock()
	delete(w.timers, dir)
	ids := slices.Collect(maps.Keys(w.dirs[dir]))
	w.mu.Unlock()
	for _, id := range ids {
		w.Changed(id)
	}
}
