package vm

import (
	"fmt"

	"github.com/containerd/errdefs"
)

// takeUser returns a user ID that no other pod has. It starts the search at a number derived from the pod's ID, so that
// a freed user ID is rarely reused immediately. The caller holds mu.
func (b *Backend) takeUser(id string) (int, error) {
	taken := make(map[int]bool, len(b.sandboxes))
	for _, p := range b.sandboxes {
		taken[p.state.UID] = true
	}
	var start uint
	for _, digit := range []byte(id[:8]) {
		start = start*31 + uint(digit)
	}
	for i := range b.cfg.VM.UIDCount {
		uid := b.cfg.VM.UIDBase + int((start+uint(i))%uint(b.cfg.VM.UIDCount))
		if !taken[uid] {
			return uid, nil
		}
	}
	return 0, fmt.Errorf("all %d users of vm.uid_count are taken by machines: %w", b.cfg.VM.UIDCount, errdefs.ErrResourceExhausted)
}
