package wasm

import (
	"context"
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

// certWatcher reports changes to the certificate files of running containers. All containers share one inotify
// instance, because the kernel allows each user only a few (fs.inotify.max_user_instances).
type certWatcher struct {
	log     *slog.Logger
	notify  *fsnotify.Watcher
	changed func(id string)
	done    chan struct{}

	mu     sync.Mutex
	dirs   map[string]map[string]bool // containers by directory
	dirOf  map[string]string          // directory by container
	timers map[string]*time.Timer     // by directory
}

func newCertWatcher(log *slog.Logger) (*certWatcher, error) {
	notify, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	w := &certWatcher{
		log: log, notify: notify, done: make(chan struct{}),
		dirs: map[string]map[string]bool{}, dirOf: map[string]string{}, timers: map[string]*time.Timer{},
	}
	go w.run()
	return w, nil
}

func (w *certWatcher) close() {
	_ = w.notify.Close()
	<-w.done
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, t := range w.timers {
		t.Stop()
	}
}

// follow watches the directory of a container's certificate.
func (w *certWatcher) follow(id, dir string) {
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

// forget stops watching the certificate of a container.
func (w *certWatcher) forget(id string) {
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

func (w *certWatcher) run() {
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
func (w *certWatcher) postpone(name string) {
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

func (w *certWatcher) report(dir string) {
	w.mu.Lock()
	delete(w.timers, dir)
	ids := slices.Collect(maps.Keys(w.dirs[dir]))
	w.mu.Unlock()
	for _, id := range ids {
		w.changed(id)
	}
}

// followCertificate watches the certificate of a container if the certificate is from a mount.
func (b *Backend) followCertificate(id string, l *life) {
	o, err := b.optionsOf(l.pod, l.container)
	if err != nil || o.tls == tlsGenerated || o.tls == tlsOff {
		return
	}
	b.watcher.follow(id, hostPathOf(l.container.Config.GetMounts(), o.tls))
}

// certificateChanged replaces the certificate of a running container with the one in its mount. If the new certificate
// is invalid, the previous one stays in use.
func (b *Backend) certificateChanged(id string) {
	h := b.ledger.Loaded(id)
	if h == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTime)
	defer cancel()
	if err := b.renew(ctx, h); err != nil {
		b.log.Error("replace certificate failed; the previous one stays in use", "container", id, "err", err)
		return
	}
	b.log.Info("certificate replaced", "container", id)
}
