package spec

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestClassifyFileError(t *testing.T) {
	for errno, class := range map[unix.Errno]error{
		unix.ENOSPC: errdefs.ErrResourceExhausted, unix.EMFILE: errdefs.ErrResourceExhausted,
		unix.ENOTDIR: errdefs.ErrInvalidArgument, unix.ELOOP: errdefs.ErrInvalidArgument,
	} {
		err := classifyFileError("field", &fs.PathError{Op: "open", Path: "/x", Err: errno})
		requireRefused(t, err, class, "field: open /x")
		assert.ErrorIs(t, err, errno)
	}
	err := classifyFileError("field", unix.EIO)
	assert.False(t, errdefs.IsInvalidArgument(err) || errdefs.IsResourceExhausted(err))
	assert.ErrorIs(t, err, unix.EIO)
}

// TestFullDisk is fault N5 for the only thing that Build creates on the host.
func TestFullDisk(t *testing.T) {
	disk := t.TempDir()
	require.NoError(t, unix.Mount("full", disk, "tmpfs", 0, "nr_inodes=2"))
	t.Cleanup(func() { assert.NoError(t, unix.Unmount(disk, unix.MNT_DETACH)) })
	for i := 0; ; i++ {
		if err := os.Mkdir(filepath.Join(disk, string(rune('a'+i))), 0o755); errors.Is(err, unix.ENOSPC) {
			break
		} else {
			require.NoError(t, err)
		}
	}
	in := testInput(t)
	in.Container.Config.Mounts = []*runtimeapi.Mount{{HostPath: filepath.Join(disk, "new"), ContainerPath: "/a"}}
	_, _, err := Build(in, fullHost())
	requireRefused(t, err, errdefs.ErrResourceExhausted, "mounts[0].host_path")
}

func BenchmarkBuild(b *testing.B) {
	in := testInput(b)
	in.Container.Config.Linux.SecurityContext.Seccomp = &runtimeapi.SecurityProfile{}
	for b.Loop() {
		build(b, in, fullHost())
	}
}
