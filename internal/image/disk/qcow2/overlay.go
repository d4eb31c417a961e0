package qcow2

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
)

// Fail points of the crash tests.
var (
	failWrite  = failpoint.New("qcow2.overlay.write")
	failRename = failpoint.New("qcow2.overlay.rename")
)

// defaultClusterBits is QEMU's default: 64 KiB.
const defaultClusterBits = 16

// Overlay configures a new overlay.
type Overlay struct {
	// ClusterBits is log2 of the cluster size; 0 means 16 (64 KiB).
	ClusterBits uint32
	// Mode is the mode of the file; 0 means 0600.
	Mode os.FileMode
	// UID and GID are the owner of the file.
	UID, GID int
}

// CreateOverlay makes an empty qcow2 image of virtualSize bytes, a multiple of 512, at path. The image does not name
// its base; the caller gives QEMU the base as a separate block node ("backing"). The file is written beside path,
// synced, and renamed, so that it is complete even after a crash (fault V4).
//
// Errors: errdefs.ErrAlreadyExists if path exists; ErrResourceExhausted if the disk is full; ErrInvalidArgument for a
// size or a cluster size that is out of range.
func CreateOverlay(ctx context.Context, path string, virtualSize uint64, o Overlay) (err error) {
	defer func() {
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			err = fmt.Errorf("%w (%w)", err, errdefs.ErrResourceExhausted)
		}
		if err != nil {
			err = fmt.Errorf("create the overlay %s of %d bytes: %w", path, virtualSize, err)
		}
	}()
	image, err := layOut(virtualSize, o.ClusterBits)
	if err != nil {
		return err
	}
	if _, err := os.Lstat(path); err == nil {
		return errdefs.ErrAlreadyExists
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	temp := path + ".new" // may exist after a crash
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	defer os.Remove(temp)
	if err := image.write(ctx, temp, o); err != nil {
		return err
	}
	if err := failRename.Hit(ctx); err != nil {
		return err
	}
	err = unix.Renameat2(unix.AT_FDCWD, temp, unix.AT_FDCWD, path, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EEXIST) {
		return errdefs.ErrAlreadyExists
	} else if err != nil {
		return fmt.Errorf("rename %s: %w", temp, err)
	}
	return syncDir(filepath.Dir(path))
}

// layout is the content of a new image.
type layout struct {
	header        header
	refcountTable uint64   // offset; the table has one entry
	refcountBlock uint64   // offset
	refcounts     []uint16 // of the clusters in use
	length        int64    // of the file in bytes
}

// layOut arranges the header, the refcount table, the refcount block and the L1 table in this order, as `qemu-img
// create` does.
func layOut(virtualSize uint64, clusterBits uint32) (*layout, error) {
	clusterBits = cmp.Or(clusterBits, defaultClusterBits)
	// Refuse clusters below 4 KiB, because a single refcount block of that size would not cover the largest L1 table.
	if clusterBits < 12 || clusterBits > maxClusterBits {
		return nil, invalidf("cluster_bits is %d, not 12 to %d", clusterBits, maxClusterBits)
	}
	if virtualSize == 0 || virtualSize%512 != 0 || virtualSize > maxSize {
		return nil, invalidf("size is %d bytes, which is not a multiple of 512 from 512 to %d", virtualSize, uint64(maxSize))
	}
	cluster := uint64(1) << clusterBits
	l1 := l1Entries(virtualSize, clusterBits, false)
	if l1*8 > maxL1Bytes {
		return nil, invalidf("size is %d bytes, which needs an L1 table of %d entries, more than the limit of %d", virtualSize, l1, maxL1Bytes/8)
	}
	used := 3 + (l1*8+cluster-1)/cluster
	if used > cluster/2 {
		return nil, invalidf("size is %d bytes with clusters of %d bytes, more than one refcount block covers", virtualSize, cluster)
	}
	l := &layout{refcountTable: cluster, refcountBlock: 2 * cluster, refcounts: make([]uint16, used), length: int64(3*cluster + l1*8)}
	for i := range l.refcounts {
		l.refcounts[i] = 1
	}
	l.header = header{
		Magic: [4]byte([]byte(Magic)), Version: 3, ClusterBits: clusterBits, Size: virtualSize,
		L1Size: uint32(l1), L1TableOffset: 3 * cluster, RefcountTableOffset: l.refcountTable, RefcountTableClusters: 1,
		RefcountOrder: 4, HeaderLength: headerCompression,
	}
	return l, nil
}

// write makes the file with its owner and mode, and syncs it. It leaves zeros as holes.
func (l *layout) write(ctx context.Context, path string, o Overlay) (err error) {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	for _, part := range []struct {
		at   uint64
		data any
	}{{0, &l.header}, {l.refcountTable, l.refcountBlock}, {l.refcountBlock, l.refcounts}} {
		raw, err := binary.Append(nil, binary.BigEndian, part.data)
		if err != nil {
			return err
		}
		if _, err := file.WriteAt(raw, int64(part.at)); err != nil {
			return err
		}
	}
	if err := failWrite.Hit(ctx); err != nil {
		return err
	}
	if err := file.Truncate(l.length); err != nil {
		return err
	}
	if o.UID != 0 || o.GID != 0 {
		if err := file.Chown(o.UID, o.GID); err != nil {
			return err
		}
	}
	if o.Mode != 0 {
		if err := file.Chmod(o.Mode); err != nil {
			return err
		}
	}
	return file.Sync()
}

func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := dir.Sync(); err != nil {
		return fmt.Errorf("sync the directory %s: %w", path, err)
	}
	return nil
}
