package wasm

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
)

// settleTime is how long a mount with a certificate must be unchanged before it is read again: a Secret is replaced by
// one rename, a file in an editor by many writes.
const settleTime = 200 * time.Millisecond

// certWatcher reports changes to the certificate files of running containers. One inotify instance serves all, because
// the kernel allows a user only few (fs.inotify.max_user_instances).
type certWatcher struct {
	log     *slog.Logger
	notify  *fsnotify.Watcher
	changed func(id string)
	done    chan struct{}

	mu     sync.Mutex
	dirs   map[string]map[string]bool // directory to the containers with their certificate in it
	of     map[string]string          // container to directory
	timers map[string]*time.Timer
}

func newCertWatcher(log *slog.Logger) (*certWatcher, error) {
	notify, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	w := &certWatcher{
		log: log, notify: notify, done: make(chan struct{}),
		dirs: map[string]map[string]bool{}, of: map[string]string{}, timers: map[string]*time.Timer{},
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
			w.log.Warn("changes of a certificate will not be seen", "container", id, "dir", dir, "err", err)
			return
		}
		w.dirs[dir] = map[string]bool{}
	}
	w.dirs[dir][id], w.of[id] = true, dir
}

// forget stops watching for a container.
func (w *certWatcher) forget(id string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	dir, ok := w.of[id]
	if !ok {
		return
	}
	delete(w.of, id)
	delete(w.dirs[dir], id)
	if len(w.dirs[dir]) == 0 {
		delete(w.dirs, dir)
		_ = w.notify.Remove(dir) // it may be gone already
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
			w.stir(e.Name)
		case err, ok := <-w.notify.Errors:
			if !ok {
				return
			}
			w.log.Warn("watch certificates", "err", err)
		}
	}
}

// stir postpones the reading of a directory that has changed until it is quiet.
func (w *certWatcher) stir(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for dir := range w.dirs {
		if name != dir && len(name) > len(dir) && name[:len(dir)+1] != dir+"/" {
			continue
		}
		if t := w.timers[dir]; t != nil {
			t.Reset(settleTime)
			continue
		}
		w.timers[dir] = time.AfterFunc(settleTime, func() { w.settled(dir) })
	}
}

func (w *certWatcher) settled(dir string) {
	w.mu.Lock()
	delete(w.timers, dir)
	var ids []string
	for id := range w.dirs[dir] {
		ids = append(ids, id)
	}
	w.mu.Unlock()
	for _, id := range ids {
		w.changed(id)
	}
}

// followCertificate watches the certificate of a container that has one in a mount.
func (b *Backend) followCertificate(id string, l *life) {
	o, err := parseOptions(l.pod.Config, b.cfg.LabelPrefix)
	if err != nil || o.tls == tlsGenerated || o.tls == tlsOff {
		return
	}
	b.watcher.follow(id, hostPathOf(l.container.Config.GetMounts(), o.tls))
}

// certificateChanged gives a running container the current certificate of its mount. If that is invalid, the previous
// one stays in use.
func (b *Backend) certificateChanged(id string) {
	h := b.ledger.Loaded(id)
	if h == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTime)
	defer cancel()
	if err := b.renew(ctx, h); err != nil {
		b.log.Error("the certificate in a mount has changed and cannot be used; the one before stays", "container", id, "err", err)
		return
	}
	b.log.Info("a certificate was replaced", "container", id)
}
