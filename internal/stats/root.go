package stats

import (
	"fmt"
	"path"
	"sync"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// DefaultMount is where every distribution mounts the cgroup file system.
const DefaultMount = "/sys/fs/cgroup"

// Root says where the cgroup hierarchies are. A test may point it at a tree of plain files.
type Root struct {
	// Mount is the mount point of the one v2 hierarchy, or the directory that holds the v1 hierarchies, one
	// directory named after each controller (and "unified" for a v2 hierarchy beside them).
	Mount string
	// V2 says which of the two it is.
	V2 bool
}

var detect = sync.OnceValues(func() (Root, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(DefaultMount, &fs); err != nil {
		return Root{}, fmt.Errorf("no cgroup file system at %s (%w): mount it: %w", DefaultMount, err, errdefs.ErrUnavailable)
	}
	return Root{Mount: DefaultMount, V2: int64(fs.Type) == unix.CGROUP2_SUPER_MAGIC}, nil
})

// Detect finds the host's hierarchies under DefaultMount, once. It is an errdefs.ErrUnavailable when there are none.
func Detect() (Root, error) { return detect() }

// Cgroup is one cgroup of a Root: a path, nothing held open, so it may be kept as long as one likes.
type Cgroup struct {
	root Root
	path string
}

// Open names a cgroup of the host by its path relative to the hierarchy roots, e.g. /kubepods/pod1/abc.
// It is an errdefs.ErrNotFound when there is no such cgroup, an ErrInvalidArgument when path is not absolute and clean.
func Open(path string) (Cgroup, error) {
	root, err := Detect()
	if err != nil {
		return Cgroup{}, err
	}
	return root.Open(path)
}

// OOMKills is Open(path).OOMKills().
func OOMKills(path string) (uint64, error) {
	c, err := Open(path)
	if err != nil {
		return 0, err
	}
	return c.OOMKills()
}

// Open names a cgroup of this root; see the function Open.
func (r Root) Open(name string) (Cgroup, error) {
	if !path.IsAbs(name) || path.Clean(name) != name {
		return Cgroup{}, fmt.Errorf("cgroup path %q is not absolute and clean: give it relative to the hierarchy root, e.g. /kubepods/pod1: %w",
			name, errdefs.ErrInvalidArgument)
	}
	c := Cgroup{root: r, path: name}
	d, err := c.dir(c.memoryController(), nil)
	if err != nil {
		return Cgroup{}, err
	}
	d.close()
	return c, nil
}

// Read takes the figures. A cgroup that is gone, wholly or while it is being read, is an errdefs.ErrNotFound.
func (c Cgroup) Read() (Figures, error) {
	if c.root.V2 {
		return c.readV2()
	}
	return c.readV1()
}

// OOMKills counts the processes of the cgroup that the OOM killer ended. On v2 those of child cgroups count too,
// on v1 the kernel has no such sum.
func (c Cgroup) OOMKills() (uint64, error) {
	buf := borrow()
	defer buf.giveBack()
	d, err := c.dir(c.memoryController(), buf)
	if err != nil {
		return 0, err
	}
	defer d.close()
	var kills uint64
	file := "memory.oom_control"
	if c.root.V2 {
		file = "memory.events"
	}
	d.pairs(file, func(key string, v uint64) {
		if key == "oom_kill" {
			kills = v
		}
	})
	return kills, d.failure()
}

// memoryController is the directory below the mount where the memory files are.
func (c Cgroup) memoryController() string {
	if c.root.V2 {
		return ""
	}
	return "memory"
}
