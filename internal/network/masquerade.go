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

// masquerading lets the pods of the embedded default reach other networks under the node's address. It makes one chain
// of iptables rules per subnet, before the first pod's ADD. The bridge plugin's ipMasq would make a chain per pod. That
// takes half of the plugin's time for ADD and most of its time for DEL, and the chain stays behind if the pod's
// namespace is gone before DEL.
//
// The rules belong to the bridge, not to a pod. Like the bridge, they are never removed.
type masquerading struct {
	// made holds the subnets (netip.Prefix) whose rules existed at the last check.
	made sync.Map
	// changing serialises checks of the rules and changes to them.
	changing sync.Mutex
}

// ensure makes the rules for the subnets, unless they existed at the last check.
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

// refresh restores rules that were flushed, for example by a firewall that reloads.
func (q *masquerading) refresh(ctx context.Context) error {
	q.changing.Lock()
	defer q.changing.Unlock()
	var failures []error
	for subnet := range q.made.Range {
		if err := masquerade(ctx, subnet.(netip.Prefix)); err != nil {
			q.made.Delete(subnet) // so that the next pod retries and reports the error
			failures = append(failures, err)
		}
	}
	return errors.Join(failures...)
}

// masquerade makes the rules for one subnet, unless they exist.
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
		":"+chain+" - [0:0]", // creates or empties the chain
		"-A "+chain+" -d "+subnet.String()+" -j RETURN",
		"-A "+chain+" -d "+multicast+" -j RETURN",
		"-A "+chain+" -j MASQUERADE",
		"-A "+jump,
	)
	if err != nil {
		return fmt.Errorf("masquerade the pods of %s: %w", subnet, err)
	}
	return nil
}
