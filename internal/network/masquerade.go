package network

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"

	"github.com/tripod-run/tripod/internal/network/iptables"
)

// masquerading lets the pods of the embedded default network reach the world with the node's address: one chain of
// iptables rules per subnet, made with the first pod. The bridge plugin would make one per pod (ipMasq), which takes
// half of the time of its ADD and more of its DEL's, and stays behind when a pod's namespace is gone before DEL.
//
// The rules belong to the bridge, not to a pod, and stay like the bridge.
type masquerading struct {
	// made holds the subnets (netip.Prefix) whose rules existed at the last check.
	made sync.Map
	// changing is held while rules are checked or made.
	changing sync.Mutex
}

// ensure makes the rules of the subnets, unless they existed at the last check.
func (q *masquerading) ensure(ctx context.Context, subnets []netip.Prefix) error {
	for _, subnet := range subnets {
		if err := q.ensureSubnet(ctx, subnet); err != nil {
			return err
		}
	}
	return nil
}

func (q *masquerading) ensureSubnet(ctx context.Context, subnet netip.Prefix) error {
	if _, ok := q.made.Load(subnet); ok {
		return nil
	}
	q.changing.Lock()
	defer q.changing.Unlock()
	if _, ok := q.made.Load(subnet); ok { // made while we waited for the lock
		return nil
	}
	if err := masquerade(ctx, subnet); err != nil {
		return err
	}
	q.made.Store(subnet, true)
	return nil
}

// refresh makes rules again that somebody has flushed, as firewalls do when they reload.
func (q *masquerading) refresh(ctx context.Context) error {
	q.changing.Lock()
	defer q.changing.Unlock()
	var failures []error
	for subnet := range q.made.Range {
		if err := masquerade(ctx, subnet.(netip.Prefix)); err != nil {
			q.made.Delete(subnet) // the next pod tries again and reports the error
			failures = append(failures, err)
		}
	}
	return errors.Join(failures...)
}

// masquerade makes the rules of one subnet, if they are missing.
func masquerade(ctx context.Context, subnet netip.Prefix) error {
	family, multicast := iptables.V4, "224.0.0.0/4"
	if subnet.Addr().Is6() {
		family, multicast = iptables.V6, "ff00::/8"
	}
	sum := sha256.Sum256([]byte(subnet.String()))
	chain := "TRIPOD-MASQ-" + hex.EncodeToString(sum[:6])
	jump := fmt.Sprintf("POSTROUTING -s %s -m comment --comment tripod-pods -j %s", subnet, chain)
	if iptables.Holds(ctx, family, strings.Fields(jump)...) {
		return nil
	}
	err := iptables.Restore(ctx, family,
		"*nat",
		":"+chain+" - [0:0]", // made, or emptied
		"-A "+chain+" -d "+subnet.String()+" -j RETURN",
		"-A "+chain+" -d "+multicast+" -j RETURN",
		"-A "+chain+" -j MASQUERADE",
		"-A "+jump,
		"COMMIT",
	)
	if err != nil {
		return fmt.Errorf("masquerade the pods of %s: %w", subnet, err)
	}
	return nil
}
