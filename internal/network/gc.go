package network

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/containerd/errdefs"
	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sync/errgroup"
)

// gcParallel bounds the leftovers that are deleted at a time, because plugins are processes.
const gcParallel = 4

// GC removes what earlier processes left of pods that are not in keep, a list of pod IDs: attachments by DEL, namespaces by
// unmounting, and what plugins hold for nobody, if the chain has the GC verb (1.1.0). It is meant for recovery. It leaves alone
// what this process has set up, so a pod that starts meanwhile is safe. Errors are joined; the next GC retries what failed.
// Nothing outside our directories is touched.
func (m *Manager) GC(ctx context.Context, keep []string) error {
	kept := map[string]bool{}
	for _, id := range keep {
		kept[keyOf(id)] = true
	}
	keys, err := m.present()
	if err != nil {
		return err
	}
	var group errgroup.Group
	group.SetLimit(gcParallel)
	failures := make([]error, len(keys))
	for i, key := range keys {
		if kept[key] {
			continue
		}
		group.Go(func() error { failures[i] = m.collect(ctx, key); return nil })
	}
	_ = group.Wait()
	return errors.Join(append(failures, m.collectPlugins(ctx))...)
}

// present lists the keys of all records and namespaces.
func (m *Manager) present() ([]string, error) {
	keys, err := m.records.keys()
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for _, key := range keys {
		seen[key] = true
	}
	entries, err := os.ReadDir(m.cfg.NetnsDir)
	if err != nil {
		return nil, fmt.Errorf("list network namespaces: %w", err)
	}
	for _, e := range entries {
		if !seen[e.Name()] && m.madeHere(e) {
			keys = append(keys, e.Name())
		}
	}
	return keys, nil
}

// madeHere reports whether an entry of NetnsDir is one of createNetns: a namespace, or the empty file that a crash
// left before the mount.
func (m *Manager) madeHere(e os.DirEntry) bool {
	if !containerIDs.MatchString(e.Name()) {
		return false
	}
	if isNetns(m.netnsPath(e.Name())) {
		return true
	}
	info, err := e.Info()
	return err == nil && info.Mode().IsRegular() && info.Size() == 0
}

func (m *Manager) collect(ctx context.Context, key string) error {
	unlock, err := m.locks.lock(ctx, key)
	if err != nil {
		return err
	}
	defer unlock()
	if m.claimed(key) {
		return nil
	}
	if err := m.detach(ctx, key); err != nil {
		return fmt.Errorf("give back the network of pod %s, which is no more: %w", key, err)
	}
	m.cfg.Logger.Info("gave back the network of a pod that is no more", "pod", key)
	return nil
}

// collectPlugins runs the GC verb. CNI allows no ADD or DEL at the same time. If one is running, the verb is left to the next GC, so
// that new pods do not wait for a slow plugin.
func (m *Manager) collectPlugins(ctx context.Context) error {
	c, err := m.currentChain()
	if err != nil || !atLeast(c.list.CNIVersion, "1.1.0") {
		return nil // no chain, no plugins; Status reports it
	}
	ctx, cancel := context.WithTimeout(ctx, rollbackTimeout)
	defer cancel()
	ctx, interrupt := context.WithCancelCause(ctx)
	defer interrupt(nil)
	m.interruptGC.Store(&interrupt) // before anybody can wait for the lock
	defer m.interruptGC.Store(nil)
	if !m.gcMu.TryLock() {
		return nil
	}
	defer m.gcMu.Unlock()
	keys, err := m.records.keys()
	if err != nil {
		return err
	}
	// Everything with a record is still valid: what is in keep, ours, and what DEL failed for.
	args := &libcni.GCArgs{}
	for _, key := range keys {
		args.ValidAttachments = append(args.ValidAttachments, types.GCAttachment{ContainerID: key, IfName: interfaceName})
	}
	if err := m.cni.GCNetworkList(ctx, c.list, args); err != nil {
		return fmt.Errorf("CNI GC by %s: %w", c.source, err)
	}
	return nil
}

// errGaveWay is the cause of a cancelled GC verb.
var errGaveWay = fmt.Errorf("it gave way to a pod, to be repeated: %w", errdefs.ErrUnavailable)

// excludeGC interrupts the GC verb for an ADD or DEL: the verb can be repeated, and no pod waits for it. Call the returned
// function afterwards.
func (m *Manager) excludeGC() (done func()) {
	if !m.gcMu.TryRLock() {
		if interrupt := m.interruptGC.Load(); interrupt != nil {
			(*interrupt)(errGaveWay)
		}
		m.gcMu.RLock()
	}
	return m.gcMu.RUnlock
}
