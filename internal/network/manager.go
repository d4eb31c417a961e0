package network

import (
	"bytes"
	"context"
	"errors"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containernetworking/cni/libcni"

	"github.com/tripod-run/tripod/internal/network/builtin"
)

// Manager sets up and tears down the networks of pods. Its methods are safe for concurrent use. Operations on one pod
// are serialised; operations on different pods run in parallel.
type Manager struct {
	cfg     Config
	cni     *libcni.CNIConfig
	exec    *pluginExec
	records recordStore
	locks   keyLocks

	// ADD and DEL hold gcMu for reading. The GC verb holds it for writing, because the verb must not run during an ADD
	// or DEL (SPEC 1.1.0, "Lifecycle & Ordering").
	gcMu sync.RWMutex
	// interruptGC cancels the running GC verb; nil if none runs.
	interruptGC atomic.Pointer[context.CancelCauseFunc]

	// claims holds the keys (string) of pods that this process has set up and not torn down. GC skips these pods.
	claims sync.Map

	mu sync.Mutex
	// defaults is Config.Default, with the subnets from UpdatePodCIDR if there are any.
	defaults DefaultNetwork

	reloading sync.Mutex // serialises reloads, so that the latest one wins
	chain     atomic.Pointer[loaded]
	status    statusCache

	firewall firewall

	life       context.Context // cancelled by Close
	end        context.CancelFunc
	background sync.WaitGroup
	backlog    backlog
	setups     tally // Setups under way, to which the backlog gives way
}

// New prepares the directories and loads the CNI configuration. An invalid CNI configuration is not an error, because
// it can be corrected while the daemon runs. Until then, Status and Setup report the error.
func New(cfg Config) (*Manager, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	exec := &pluginExec{timeout: cfg.PluginTimeout, log: cfg.Logger}
	if !cfg.Executables {
		exec.plan = planBuiltin(&builtin.Plugins{})
	}
	m := &Manager{
		cfg:      cfg,
		exec:     exec,
		cni:      libcni.NewCNIConfigWithCacheDir(cfg.BinDirs, cfg.CacheDir, exec),
		records:  recordStore{dir: filepath.Join(cfg.CacheDir, "attachments")},
		defaults: cfg.Default,
		status:   statusCache{first: make(chan struct{}), versions: map[string]pluginVersions{}},
	}
	m.life, m.end = context.WithCancel(context.Background())
	err := errors.Join(m.records.open(), m.loadPodCIDR(), prepareNetnsDir(cfg.NetnsDir))
	if err != nil {
		return nil, err
	}
	m.reload()
	m.inBackground(m.watch)
	m.inBackground(m.watchFirewall)
	return m, nil
}

// closePatience limits how long Close waits for releases under way, which take milliseconds.
const closePatience = 3 * time.Second

// Close ends the background work and waits for it. Releases under way can first be completed. Pods keep their network.
func (m *Manager) Close() error {
	cut := time.AfterFunc(closePatience, m.end)
	m.backlog.open.Lock() // never unlocked: no release begins any more
	cut.Stop()
	m.mu.Lock()
	m.end()
	m.mu.Unlock()
	m.background.Wait()
	return nil
}

// inBackground runs fn in a goroutine, unless m.life has ended. fn must return soon after m.life ends. inBackground
// reports whether fn runs.
func (m *Manager) inBackground(fn func()) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.life.Err() != nil {
		return false
	}
	m.background.Go(fn)
	return true
}

// lockPod locks the pod with this ID and returns the pod's key. The returned function unlocks the pod.
func (m *Manager) lockPod(ctx context.Context, id string) (key string, unlock func(), err error) {
	if err := validateID(id); err != nil {
		return "", nil, err
	}
	unlock, err = m.locks.lock(ctx, keyOf(id))
	return keyOf(id), unlock, err
}

// leasesDir returns the directory of host-local's leases for the embedded default chain.
func (m *Manager) leasesDir() string { return filepath.Join(m.cfg.CacheDir, "leases") }

// reload loads the chain from ConfDir again, and logs if the chain has changed. The embedded default also changes with
// the uplink's MTU.
func (m *Manager) reload() {
	m.reloading.Lock()
	defer m.reloading.Unlock()
	m.mu.Lock()
	def := m.defaults
	m.mu.Unlock()
	if def.MTU == 0 {
		var err error
		if def.MTU, err = UplinkMTU(); err != nil {
			m.cfg.Logger.Warn("pods get the kernel's default MTU", "err", err)
		}
	}

	var last *chain
	old := m.chain.Load()
	if old != nil {
		last = old.chain
	}
	c, err := findChain(m.cfg.ConfDir, def, m.leasesDir(), last)
	m.chain.Store(&loaded{chain: c, err: err})
	switch {
	case err != nil && (old == nil || old.err == nil || old.err.Error() != err.Error()):
		m.cfg.Logger.Error("CNI configuration cannot be loaded", "err", err)
	case err == nil && (old == nil || old.chain == nil || c.source != old.chain.source || !bytes.Equal(c.list.Bytes, old.chain.list.Bytes)):
		m.firewall.newChain.Store(true)
		m.cfg.Logger.Info("CNI configuration loaded", "configuration", c.source, "network", c.list.Name, "cniVersion", c.list.CNIVersion)
	}
}

// currentChain returns the chain for new pods.
func (m *Manager) currentChain() (*chain, error) {
	now := m.chain.Load()
	return now.chain, now.err
}
