package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The modes of the daemon's directories. The root users of pods' user namespaces pass through the state directory to
// their pods' files, so others can enter that directory, but not read it. Everything else in it is closed to others.
const (
	rootMode  fs.FileMode = 0o700
	stateMode fs.FileMode = 0o711
)

// privateDir creates dir with the given mode, or checks an existing directory (fault C7). It corrects another mode, and
// rejects a directory that belongs to another user, who could have planted its content.
func privateDir(dir string, want fs.FileMode, log *slog.Logger) error {
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	fd, err := unix.Open(dir, unix.O_DIRECTORY|unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	if int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("%s belongs to uid %d, but this program runs as uid %d; check its content and run `chown -R %d %s`, or choose another directory",
			dir, st.Uid, os.Geteuid(), os.Geteuid(), dir)
	}
	mode := fs.FileMode(st.Mode & 0o777)
	if mode == want {
		return nil
	}
	if mode&^want&0o077 != 0 {
		log.Warn("the directory was open to others; closing it", "dir", dir, "mode", fmt.Sprintf("%#o", mode))
	}
	if err := unix.Fchmod(fd, uint32(want)); errors.Is(err, unix.EROFS) {
		log.Error("the directory keeps its mode until its file system is writable", "dir", dir, "mode", fmt.Sprintf("%#o", mode), "err", err)
	} else if err != nil {
		return fmt.Errorf("%s has mode %#o, which cannot be changed: %w; run `chmod %o %s`", dir, mode, err, want, dir)
	}
	return nil
}

// mountRunDir mounts a tmpfs on the directory for run-time files, so that the daemon can still start, stop and remove
// pods if something fills the node's /run (fault C10). The tmpfs has the limits that systemd sets for /run. It outlives
// the daemon, like the pods. If the directory is not empty, no tmpfs is mounted on it until a reboot empties it.
func mountRunDir(dir string, log *slog.Logger) error {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, dir, unix.AT_SYMLINK_NOFOLLOW, 0, &st); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	if st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 {
		return nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	if len(entries) > 0 {
		log.Warn("the directory has no file system of its own until the next reboot", "dir", dir)
		return nil
	}
	if err := unix.Mount("tripod", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV,
		fmt.Sprintf("mode=%o,size=20%%,nr_inodes=800k", stateMode)); err != nil {
		return fmt.Errorf("mount a tmpfs on %s: %w", dir, err)
	}
	return nil
}

// A daemon waits up to lockTimeout for its predecessor to release the lock, because a killed process takes some time to
// end. A service manager may start the next daemon in that time.
const (
	lockTimeout  = 5 * time.Second
	lockInterval = 20 * time.Millisecond
)

// lockDir locks dir for this process while the returned file is open, so that two daemons never share a directory. The
// lock ends with the process, even if it is killed.
func lockDir(ctx context.Context, dir string) (*os.File, error) {
	file := filepath.Join(dir, "lock")
	f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o600)
	if errors.Is(err, unix.EROFS) {
		if f, err = os.OpenFile(file, os.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0); errors.Is(err, fs.ErrNotExist) {
			f, err = os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		}
	}
	if err != nil {
		return nil, err
	}
	if err := flock(ctx, f); err != nil {
		holder, _ := os.ReadFile(f.Name())
		_ = f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("another process (pid %s) uses %s; stop it, or choose another directory", strings.TrimSpace(string(holder)), dir)
		}
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	if err := f.Truncate(0); err == nil {
		_, _ = f.WriteAt(fmt.Appendf(nil, "%d\n", os.Getpid()), 0) // only for the message above
	}
	return f, nil
}

// flock retries for up to lockTimeout, because flock(2) has no timeout.
func flock(ctx context.Context, f *os.File) error {
	ctx, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
		select {
		case <-time.After(lockInterval):
		case <-ctx.Done():
			return err
		}
	}
}

// errRecordGone means that the record is missing although there are pods. Recovery with a new record would remove those
// pods.
var errRecordGone = errors.New("the record is gone but its pods are not")

// refuseLostRecord returns an error if the record file is missing although there are pods, for example because its disk
// is not mounted yet (fault N7). Call it before creating a record file. The given directories have an entry for each
// pod.
func refuseLostRecord(record string, pods ...string) error {
	if _, err := os.Stat(record); err == nil {
		return nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err // unreadable does not mean missing
	}
	for _, dir := range pods {
		entries, err := os.ReadDir(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if len(entries) > 0 {
			return fmt.Errorf("%w: %s does not exist, while %s holds what belongs to %d pods (%s, …). "+
				"Is the file system of %s mounted? Mount it and start again. To give those pods up, reboot the node or "+
				"end their processes, unmount and remove what is in %s",
				errRecordGone, record, dir, len(entries), entries[0].Name(), filepath.Dir(record), dir)
		}
	}
	return nil
}

// fileLimit returns this process's limit of open files. At its start, the Go runtime raises the soft limit to the hard
// limit, but children get the original soft limit. If we raised the soft limit ourselves, children would keep the
// higher limit. In containers, programs that try every possible descriptor would then be slow.
func fileLimit() (uint64, error) {
	var limit unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit)
	return limit.Cur, err
}
