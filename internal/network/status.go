package network

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
)

const (
	// refreshInterval is the time between refreshes of the status if no event arrives. Without these refreshes, a
	// change to a plugin, or to a plugin's answer to STATUS, would go unnoticed, because no event reports it.
	refreshInterval = 10 * time.Second
	// settleTime is the pause after an event. In this time, the writer of a configuration file can finish the file.
	settleTime = 50 * time.Millisecond
	// probeTimeout limits each refresh of the status.
	probeTimeout = 5 * time.Second
)

// statusCache holds the last status.
type statusCache struct {
	verdict atomic.Pointer[verdict]
	first   chan struct{} // closed when verdict is first set
	once    sync.Once
	// versions caches each plugin file's answer to VERSION, by path. Only the watch goroutine uses it.
	versions map[string]pluginVersions
}

type verdict struct{ err error }

type pluginVersions struct {
	modified  time.Time
	size      int64
	supported []string
}

func (s *statusCache) set(err error) {
	s.verdict.Store(&verdict{err: err})
	s.once.Do(func() { close(s.first) })
}

// Status returns nil if pods can get a network (CRI condition NetworkReady). Otherwise the error says what is wrong and
// what to do; its class is ErrFailedPrecondition or ErrUnavailable. Status answers from memory, and waits only for the
// first status. It reflects changes to the configuration directory almost immediately, and other changes within 10 s.
func (m *Manager) Status(ctx context.Context) error {
	if v := m.status.verdict.Load(); v != nil {
		return v.err
	}
	select {
	case <-m.status.first:
		return m.status.verdict.Load().err
	case <-m.life.Done():
		return fmt.Errorf("network manager is closed: %w", errdefs.ErrUnavailable)
	case <-ctx.Done():
		return fmt.Errorf("network status is not known yet: %w", context.Cause(ctx))
	}
}

// watch keeps the chain and the status up to date until Close.
func (m *Manager) watch() {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		m.cfg.Logger.Warn("CNI configuration cannot be watched, polling it every 10 s", "err", err)
		watcher = &fsnotify.Watcher{} // its nil channels never deliver
	} else {
		defer watcher.Close()
	}
	tick := time.NewTicker(refreshInterval)
	defer tick.Stop()
	settled := time.NewTimer(0)
	pending := true
	for {
		select {
		case <-m.life.Done():
			return
		case <-watcher.Events:
			if !pending {
				settled.Reset(settleTime)
				pending = true
			}
			continue
		case <-watcher.Errors: // events were lost: reload, as after an event
		case <-settled.C:
			pending = false
		case <-tick.C:
		}
		if err == nil {
			m.watchConfDir(watcher)
		}
		m.reload()
		m.refreshStatus()
	}
}

// watchConfDir watches the configuration directory, or its nearest existing parent.
func (m *Manager) watchConfDir(watcher *fsnotify.Watcher) {
	dir := nearestDir(m.cfg.ConfDir)
	for {
		if err := watcher.Add(dir); err != nil {
			m.cfg.Logger.Warn("CNI configuration directory cannot be watched", "directory", dir, "err", err)
			return
		}
		for _, old := range watcher.WatchList() {
			if old != dir {
				_ = watcher.Remove(old)
			}
		}
		nearer := nearestDir(m.cfg.ConfDir)
		if nearer == dir {
			return
		}
		dir = nearer // made before the watch began
	}
}

// nearestDir returns path, or its nearest parent that is a directory.
func nearestDir(path string) string {
	for path != "/" {
		if info, err := os.Stat(path); err == nil && info.IsDir() {
			break
		}
		path = filepath.Dir(path)
	}
	return path
}

// refreshStatus refreshes the status and logs a change.
func (m *Manager) refreshStatus() {
	ctx, cancel := context.WithTimeout(m.life, probeTimeout)
	defer cancel()
	old := m.status.verdict.Load()
	err := m.probe(ctx)
	if c, _ := m.currentChain(); err == nil && c.embedded() {
		err = m.firewall.failure.Load().error()
	}
	if m.life.Err() != nil {
		return
	}
	m.status.set(err)
	switch {
	case err != nil && (old == nil || old.err == nil || old.err.Error() != err.Error()):
		m.cfg.Logger.Warn("network is not ready", "err", err)
	case err == nil && (old == nil || old.err != nil):
		m.cfg.Logger.Info("network is ready")
	}
}

// probe checks whether the current chain can work.
func (m *Manager) probe(ctx context.Context) error {
	err := m.records.makeDir()
	if err == nil {
		err = unix.Access(m.records.dir, unix.W_OK)
	}
	if err != nil {
		return fmt.Errorf("directory of network records %s is not writable: %w: %w", m.records.dir, err, errdefs.ErrUnavailable)
	}
	c, err := m.currentChain()
	if err != nil {
		return err
	}
	for _, program := range c.programs() {
		path, err := m.exec.FindInPath(program, m.cfg.BinDirs)
		if err != nil {
			return fmt.Errorf("CNI configuration %s: %w", c.source, err)
		}
		if err := m.probeVersion(ctx, program, path, c.list.CNIVersion); err != nil {
			return fmt.Errorf("CNI configuration %s: %w", c.source, err)
		}
	}
	if c.embedded() {
		if _, err := exec.LookPath("iptables"); err != nil {
			return fmt.Errorf("%s needs iptables for masquerading and host ports (on Debian: apt-get install iptables): %w: %w",
				c.source, err, errdefs.ErrFailedPrecondition)
		}
	}
	if err := m.cni.GetStatusNetworkList(ctx, c.list); err != nil { // does nothing below 1.1.0
		return fmt.Errorf("CNI configuration %s: its plugins are not ready (see their logs, or those of the network's agent): %w", c.source, err)
	}
	return nil
}

// probeVersion checks that a plugin supports the wanted CNI version. It runs VERSION only if the plugin's file is new
// or has changed. A plugin that fails at VERSION is accepted, because plugins of the first CNI release lack VERSION.
func (m *Manager) probeVersion(ctx context.Context, program, path, wanted string) error {
	info, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("CNI plugin %s: %w: %w", program, err, errdefs.ErrFailedPrecondition)
	}
	known, ok := m.status.versions[path]
	if !ok || !known.modified.Equal(info.ModTime()) || known.size != info.Size() {
		known = pluginVersions{modified: info.ModTime(), size: info.Size()}
		if answer, err := m.cni.GetVersionInfo(ctx, program); err == nil {
			known.supported = answer.SupportedVersions()
		} else if ctx.Err() != nil {
			return fmt.Errorf("CNI plugin %s does not answer: %w", path, err)
		}
		m.status.versions[path] = known
	}
	if len(known.supported) > 0 && !slices.Contains(known.supported, wanted) {
		return fmt.Errorf("CNI plugin %s does not speak version %s, only %s (lower cniVersion, or install newer plugins): %w",
			path, wanted, strings.Join(known.supported, ", "), errdefs.ErrFailedPrecondition)
	}
	return nil
}

// atLeast reports whether the CNI version v is the given minimum or newer.
func atLeast(v, minimum string) bool {
	ok, err := version.GreaterThanOrEqualTo(v, minimum)
	return err == nil && ok
}
