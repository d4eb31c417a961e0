package network

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/containernetworking/cni/libcni"
	"github.com/vishvananda/netlink"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/spans"
)

var teardownDel = failpoint.New("network.teardown.del")

// Teardown releases everything that Setup took. It can be called repeatedly and in any state, even after an interrupted
// Setup or a reboot. For an unknown pod it does nothing. It uses only the ID in the attachment, because Setup has
// recorded the chain and the arguments. After an error, call Teardown again.
//
// If the whole chain runs in this process, Teardown returns at once and the release continues in the background, because
// the kernel needs tens of milliseconds to delete an interface. The pod's record stays until the release is complete, so
// a new process continues it (GC), and the pod's address is not leased again before its interface is gone. A chain with
// an executable, as for host ports, has released everything when Teardown returns.
func (m *Manager) Teardown(ctx context.Context, a Attachment) error {
	key, unlock, err := m.lockPod(ctx, a.ID)
	if err != nil {
		return err
	}
	rec, err := m.records.get(key)
	if err == nil && rec != nil && m.delRunsInProcess(ctx, rec) && m.releaseInBackground(release{rec, m.retryAfter(rec, unlock)}) {
		return nil
	}
	defer unlock()
	if err := m.detach(ctx, key); err != nil {
		return fmt.Errorf("release the network of pod %s: %w", a.ID, err)
	}
	return nil
}

// retryAfter ends a release in the background: it unlocks the pod and retries if the release has failed.
func (m *Manager) retryAfter(rec *record, unlock func()) func(error) {
	return func(err error) {
		unlock()
		if err != nil && m.life.Err() == nil {
			m.cfg.Logger.Warn("release of a pod's network failed, will retry", "pod", rec.ID, "err", err)
			m.retry(rec)
		}
	}
}

// delRunsInProcess reports whether DEL of the recorded chain needs no executable.
func (m *Manager) delRunsInProcess(ctx context.Context, rec *record) bool {
	if m.exec.plan == nil {
		return false
	}
	rehearsal := &rehearsal{plugins: len(rec.list.Plugins)}
	_ = m.cni.DelNetworkList(context.WithValue(ctx, rehearsalKey{}, rehearsal), rec.list, rec.runtimeConf(m.netnsPath(rec.key)))
	return rehearsal.plugins == 0
}

// detach does the work of Teardown, with the pod's lock held: DEL first, then the namespace, then the record. In this
// order, detach can be repeated after a crash at any point.
func (m *Manager) detach(ctx context.Context, key string) error {
	rec, err := m.records.get(key)
	if errors.Is(err, errCorrupt) {
		rec, err = m.substituteRecord(key, err)
	}
	if err != nil {
		return err
	}
	if rec != nil {
		if err := m.del(ctx, rec); err != nil {
			return err
		}
	}
	return m.forget(ctx, key)
}

// forget does the work of detach after DEL.
func (m *Manager) forget(ctx context.Context, key string) error {
	if err := teardownDel.Hit(ctx); err != nil {
		return err
	}
	if err := removeNetns(m.netnsPath(key)); err != nil {
		return err
	}
	if err := m.records.remove(key); err != nil {
		return err
	}
	m.claims.Delete(key)
	return nil
}

// del runs DEL of the recorded chain. If the namespace is gone, plugins get an empty path and release only what is
// outside the namespace, mainly leases.
func (m *Manager) del(ctx context.Context, rec *record) error {
	netns := m.netnsPath(rec.key)
	if !isNetns(netns) {
		netns = ""
	}
	m.firewall.ports.Delete(rec.key) // no rules are restored any more, even if a plugin fails
	defer m.excludeGC()()
	return spans.Run(ctx, "cni.del", func(ctx context.Context) error {
		return m.cni.DelNetworkList(ctx, rec.list, rec.runtimeConf(netns))
	}, spans.String("cni.network", rec.list.Name))
}

// substituteRecord makes a record to use in place of a damaged one. A plugin finds a pod's resources by the container
// ID, so DEL of the current chain most likely works.
func (m *Manager) substituteRecord(key string, damage error) (*record, error) {
	c, err := m.currentChain()
	if err != nil {
		return nil, errors.Join(damage, err)
	}
	m.cfg.Logger.Error("network record is damaged, using the current configuration for DEL", "err", damage, "configuration", c.source)
	return &record{ID: key, Interface: interfaceName, Args: [][2]string{{"IgnoreUnknown", "1"}}, key: key, list: c.list}, nil
}

// Check reports whether the pod's network is as Setup left it: the namespace exists and the plugins' CHECK succeeds, if
// the chain's CNI version has CHECK (0.4.0). If the backend has taken over the pod's addresses, CHECK would report them
// missing, so Check only tests whether the pod's interface exists. If Setup has not set up the pod, Check returns
// ErrNotFound.
func (m *Manager) Check(ctx context.Context, a Attachment) error {
	key, unlock, err := m.lockPod(ctx, a.ID)
	if err != nil {
		return err
	}
	defer unlock()
	rec, err := m.records.get(key)
	if err != nil {
		return fmt.Errorf("network of pod %s: %w", a.ID, err)
	}
	if rec == nil {
		return fmt.Errorf("network of pod %s: %w", a.ID, errdefs.ErrNotFound)
	}
	netns := m.netnsPath(key)
	if !isNetns(netns) {
		return fmt.Errorf("network of pod %s: its network namespace %s is gone: %w", a.ID, netns, errdefs.ErrFailedPrecondition)
	}
	if taken, err := m.checkBackendLink(netns, rec.Interface); err != nil {
		return fmt.Errorf("network of pod %s: %w", a.ID, err)
	} else if taken {
		return nil
	}
	err = m.cni.CheckNetworkList(ctx, rec.list, rec.runtimeConf(netns))
	if err != nil && !errors.Is(err, libcni.ErrorCheckNotSupp) {
		return fmt.Errorf("network of pod %s: %w", a.ID, err)
	}
	return nil
}

// checkBackendLink reports whether the backend has taken over the pod's addresses. If it has, a missing pod interface
// is an error.
func (m *Manager) checkBackendLink(netns, ifName string) (taken bool, err error) {
	links, err := m.links(netns)
	if err != nil {
		return false, err
	}
	taken = slices.ContainsFunc(links, m.cfg.IsBackendLink)
	if taken && !slices.ContainsFunc(links, func(l netlink.Link) bool { return l.Attrs().Name == ifName }) {
		return true, fmt.Errorf("interface %s is gone from %s: %w", ifName, netns, errdefs.ErrFailedPrecondition)
	}
	return taken, nil
}
