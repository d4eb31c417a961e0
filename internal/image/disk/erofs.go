package disk

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/image/internal/layer"
)

// MediaTypeErofs is the type of root disks. They never leave the node.
const MediaTypeErofs = "application/vnd.tripod.rootdisk.erofs"

const (
	// mkfsProgram makes root disks. It is in Debian's package mkfsPackage.
	mkfsProgram = "mkfs.erofs"
	mkfsPackage = "erofs-utils"
	// mkfsName is the longest file name in bytes that mkfs.erofs 1.5 stores. It cuts off the last byte of longer ones.
	mkfsName = 254
	// mkfsEpoch is the disk's time of creation in seconds, year 9999: mkfs.erofs cuts off the files' times there, and
	// would otherwise store the current time, so that no two disks would be equal.
	mkfsEpoch = 253402300799
)

// checkNames refuses a tree with a file name that mkfs.erofs would cut off: the disk could have the wrong file in its
// place.
func checkNames(ctx context.Context, r *layer.Root) error {
	return filepath.WalkDir(r.Path, func(path string, file fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case len(file.Name()) > mkfsName && path != r.Path:
			return failure.Invalidf("the file name %.40q… has %d bytes; %s stores at most %d", file.Name(), len(file.Name()), mkfsProgram, mkfsName)
		}
		return nil
	})
}

// diskUUID derives the UUID of an image's root disk from the image's ID (RFC 9562, version 8). The same image always
// makes the same disk in one store. Elsewhere the order of its files can differ.
func diskUUID(imageID string) string {
	b := []byte(digest.FromString(imageID).Encoded()[:32])
	b[12], b[16] = '8', "89ab"[b[16]%4]
	return fmt.Sprintf("%s-%s-%s-%s-%s", b[:8], b[8:12], b[12:16], b[16:20], b[20:])
}

// FindMkfs returns the path of mkfs.erofs, or errdefs.ErrFailedPrecondition.
func FindMkfs() (string, error) {
	program, err := exec.LookPath(mkfsProgram)
	if err != nil {
		return "", fmt.Errorf("%s is missing; install the package %s: %w", mkfsProgram, mkfsPackage, errdefs.ErrFailedPrecondition)
	}
	return program, nil
}

// MakeErofs makes the root disk of an image: program is that of FindMkfs, and root the image's root. The calling thread must
// be locked to the goroutine, as in layer.WithRoot: mkfs.erofs gets its mounts, and is killed when the thread ends, which also
// happens when this process dies. The end of ctx kills it, too. A file name that is too long for a disk is
// errdefs.ErrInvalidArgument, and a full file system errdefs.ErrResourceExhausted.
func MakeErofs(ctx context.Context, program string, disk *os.File, root *layer.Root, imageID string) error {
	if err := checkNames(ctx, root); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, program, "-d0", "--quiet", "-U"+diskUUID(imageID), "/proc/self/fd/3", root.Path)
	said := &head{limit: 4 << 10}
	cmd.Dir, cmd.Stderr, cmd.ExtraFiles = "/", said, []*os.File{disk}
	cmd.Env = []string{"LC_ALL=C", "PATH=" + os.Getenv("PATH"), fmt.Sprintf("SOURCE_DATE_EPOCH=%d", mkfsEpoch)}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return mkfsError(err, said.String())
}

// mkfsError returns the error of a failed mkfs.erofs with what it has written to its standard error. A disk that fills
// up ends its last write early.
func mkfsError(err error, said string) error {
	err = fmt.Errorf("%s: %w: %q", mkfsProgram, err, strings.Join(strings.Fields(said), " "))
	for _, full := range []string{unix.ENOSPC.Error(), unix.EDQUOT.Error(), "was truncated"} {
		if strings.Contains(strings.ToLower(said), full) {
			return fmt.Errorf("%w (%w)", err, errdefs.ErrResourceExhausted)
		}
	}
	return err
}

// head keeps the first bytes that are written to it.
type head struct {
	buf   bytes.Buffer
	limit int
}

func (h *head) Write(p []byte) (int, error) {
	h.buf.Write(p[:min(len(p), h.limit-h.buf.Len())])
	return len(p), nil
}

func (h *head) String() string { return h.buf.String() }
