package stats

import (
	"fmt"

	"github.com/containerd/errdefs"
)

// CheckShrink returns errdefs.ErrFailedPrecondition if the processes of a cgroup use more memory than the given new
// limit in bytes, not counting caches that the kernel can drop. On v2 the kernel would accept the limit and kill the
// processes; on v1 it refuses the limit by itself. A limit of 0 or less, and a missing cgroup, pass.
func CheckShrink(name string, limit int64) error {
	root, err := host()
	if err != nil {
		return err
	}
	return root.CheckShrink(name, limit)
}

// CheckShrink is like the function CheckShrink, for a cgroup in this root.
func (r Root) CheckShrink(name string, limit int64) error {
	if limit <= 0 {
		return nil
	}
	f, err := r.Read(name)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if f.Memory.WorkingSet <= uint64(limit) {
		return nil
	}
	return fmt.Errorf("memory limit of %d bytes: the processes use %d, and the kernel would kill them; wait until they use less, or stop them: %w",
		limit, f.Memory.WorkingSet, errdefs.ErrFailedPrecondition)
}
