package network

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/containerd/errdefs"
	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/tripod-run/tripod/internal/guard"
)

// gcParallel limits how many pods' networks GC releases in parallel with executables.
const gcParallel = 4

// GC cleans up after the pods of earlier processes. It runs DEL for each such pod and unmounts the pod's namespace. It
// skips pods whose IDs are in keep. It also skips pods that this process has set up, so new pods may start while GC
// runs. Finally, it runs the chain's GC verb, if the chain's CNI version has that verb (1.1.0). Call GC after a
// restart. It looks only in the Manager's directories. Errors are joined; the next GC retries what failed.
func (m *Manager) GC(ctx context.Context, keep []string) error {
	keepKeys := map[string]bool{}
	for _, id := range keep {
		keepKeys[keyOf(id)] = true
	}
	keys, err := m.allKeys()
	if err != nil {
		return err
	}
	var group guard.Group
	executables := make(chan struct{}, gcParallel)
	failures := make([]error, len(keys))
	for i, key := range keys {
		if !keepKeys[key] {
			group.Go(func() error { failures[i] = m.collect(ctx, key, executables); return nil })
		}
	}
	_ = group.Wait() // the parts return nil
	return errors.Join(append(failures, m.runGCVerb(ctx))...)
}

// allKeys returns the keys of all records and namespaces.
func (m *Manager) allKeys() ([]string, error) {
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

// madeHere reports whether createNetns made the entry. Such an entry is a mounted namespace or, if a crash prevented
// the mount, an empty file.
func (m *Manager) madeHere(e os.DirEntry) bool {
	if !containerIDs().MatchString(e.Name()) {
		return false
	}
	if isNetns(m.netnsPath(e.Name())) {
		return true
	}
	info, err := e.Info()
	return err == nil && info.Mode().IsRegular() && info.Size() == 0
}

// collect releases the network of a pod, unless this process has set it up.
func (m *Manager) collect(ctx context.Context, key string, executables chan struct{}) error {
	unlock, err := m.locks.lock(ctx, key)
	if err != nil {
		return err
	}
	if _, ours := m.claims.Load(key); ours {
		unlock()
		return nil
	}
	released := make(chan error, 1)
	rec, err := m.records.get(key)
	inBackground := err == nil && rec != nil && m.delRunsInProcess(ctx, rec) && m.releaseInBackground(release{rec, func(err error) {
		unlock()
		released <- err
	}})
	if inBackground {
		select {
		case err = <-released:
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	} else {
		executables <- struct{}{}
		err = m.detach(ctx, key)
		<-executables
		unlock()
	}
	if err != nil {
		return fmt.Errorf("release the network of removed pod %s: %w", key, err)
	}
	m.cfg.Logger.Info("released the network of a removed pod", "pod", key)
	return nil
}

// runGCVerb runs the chain's GC verb. CNI forbids the verb while an ADD or DEL runs. In that case, runGCVerb leaves the
// verb to the next GC, so that new pods never wait for a slow plugin.
func (m *Manager) runGCVerb(ctx context.Context) error {
	c, err := m.currentChain()
	if err != nil || !atLeast(c.list.CNIVersion, "1.1.0") {
		return nil // Status reports err
	}
	ctx, cancel := context.WithTimeout(ctx, rollbackTimeout)
	defer cancel()
	ctx, interrupt := context.WithCancelCause(ctx)
	defer interrupt(nil)
	m.interruptGC.Store(&interrupt) // must be set before excludeGC can wait for the lock
	defer m.interruptGC.Store(nil)
	if !m.gcMu.TryLock() {
		return nil
	}
	defer m.gcMu.Unlock()
	keys, err := m.records.keys()
	if err != nil {
		return err
	}
	// Every record is a valid attachment. It belongs to a pod in keep, to a pod of this process, or to a pod whose DEL
	// failed.
	args := &libcni.GCArgs{}
	for _, key := range keys {
		args.ValidAttachments = append(args.ValidAttachments, types.GCAttachment{ContainerID: key, IfName: interfaceName})
	}
	if err := m.cni.GCNetworkList(ctx, c.list, args); err != nil {
		return fmt.Errorf("CNI GC by %s: %w", c.source, err)
	}
	return nil
}

// errGaveWay is the cancellation cause of an interrupted GC verb.
var errGaveWay = fmt.Errorf("gave way to a pod's ADD or DEL (retry it): %w", errdefs.ErrUnavailable)

// excludeGC keeps the GC verb from running during an ADD or DEL. If the verb is running, excludeGC interrupts it, so
// that the pod does not wait. The next GC then repeats the verb. Call the returned function after the ADD or DEL.
func (m *Manager) excludeGC() (done func()) {
	if !m.gcMu.TryRLock() {
		if interrupt := m.interruptGC.Load(); interrupt != nil {
			(*interrupt)(errGaveWay)
		}
		m.gcMu.RLock()
	}
	return m.gcMu.RUnlock
}
