package console

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/crilog"
)

const (
	// batch is how much of the serial log is read at once, and about how much is written to the container's.
	batch = 64 << 10
	// gather is how long to wait for more output before copying: a guest writes to its console byte by byte.
	gather = 10 * time.Millisecond
	// retry is the pause after a failed write, and between polls where inotify does not work.
	retry = time.Second
	// punchSize is how much of the serial log is freed at once, at least; punchAlign is the size of a file system's block.
	punchSize, punchAlign = 256 << 10, 4 << 10
)

// buffers are shared, since most relays wait.
var buffers = sync.Pool{New: func() any { return &buffer{in: make([]byte, batch)} }}

type buffer struct{ in, out []byte }

// relay copies a serial log into a container's log.
type relay struct {
	cfg    Config
	log    *slog.Logger
	wake   chan struct{}
	cancel context.CancelFunc
	done   chan struct{}
	poll   bool // inotify does not work
	// needs returns the offset from which others still read.
	needs func() int64

	mu      sync.Mutex
	serial  *os.File
	state   *os.File
	file    *os.File // the container's log; nil: none is wanted
	at      record
	punched int64 // bytes of the serial log that are freed; -1 if the file system cannot
	late    bool  // the container's log is still to be opened
	full    bool  // the container's log has no room left
	// lostAt is the size of the serial log when its file system was full; 0: it was not.
	lostAt int64
	closed bool
}

func openRelay(cfg Config) (*relay, error) {
	cfg.SerialLog = filepath.Clean(cfg.SerialLog) // as the kernel's events name it
	r := &relay{cfg: cfg, log: cfg.Logger, wake: make(chan struct{}, 1), done: make(chan struct{})}
	if err := r.open(); err != nil {
		_ = r.closeFiles()
		return nil, err
	}
	if err := serialLogs.add(cfg.SerialLog, r.wake); err != nil {
		r.log.Warn("polling a serial log every second, since inotify does not work", "path", cfg.SerialLog, "err", err)
		r.poll = true
	}
	return r, nil
}

// start begins to copy.
func (r *relay) start() {
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	go r.run(ctx)
}

// run copies output until close.
func (r *relay) run(ctx context.Context) {
	defer close(r.done)
	failing := false
	for ctx.Err() == nil {
		err := r.catchUp(ctx, false)
		if err != nil != failing {
			if failing = err != nil; failing {
				r.log.Warn("a console's output cannot be logged; will try again", "serial log", r.cfg.SerialLog, "err", err)
			} else {
				r.log.Info("a console's output is logged again", "serial log", r.cfg.SerialLog)
			}
		}
		var again <-chan time.Time
		wake := r.wake
		if failing || r.poll {
			again = time.After(retry)
		}
		if failing {
			wake = nil
		}
		select {
		case <-wake:
		case <-again:
			continue
		case <-ctx.Done():
			return
		}
		select {
		case <-time.After(gather):
		case <-ctx.Done():
		}
	}
}

// drain copies everything, an unfinished line too.
func (r *relay) drain(ctx context.Context) error {
	for {
		err := r.catchUp(ctx, true)
		if err == nil || errors.Is(err, os.ErrClosed) {
			return err
		}
		select {
		case <-time.After(retry):
		case <-ctx.Done():
			return fmt.Errorf("the last output of the console is not in the log: %w", err)
		}
	}
}

// catchUp copies what there is.
func (r *relay) catchUp(ctx context.Context, last bool) error {
	for ctx.Err() == nil {
		if more, err := r.step(last); err != nil || !more {
			return err
		}
	}
	return ctx.Err()
}

// step copies a piece. There is more when something was copied.
func (r *relay) step(last bool) (more bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false, os.ErrClosed
	}
	if r.late {
		if err := r.begin(); err != nil {
			return false, err
		}
	}
	b := buffers.Get().(*buffer)
	defer buffers.Put(b)
	n, err := r.serial.ReadAt(b.in, r.at.offset)
	if err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	used := b.entries(n, last && errors.Is(err, io.EOF))
	if used > 0 {
		if err := r.commit(b.out, int64(used)); err != nil {
			return false, err
		}
	}
	r.noticeLoss()
	if r.lostAt > 0 && (used == 0 || r.at.offset >= r.lostAt) {
		if err := r.append(lossNote); err != nil {
			return false, err
		}
		r.lostAt, last = 0, true // make room at once
	}
	r.punch(last)
	return used > 0, nil
}

// lossNote is in the log where output may be missing.
const lossNote = "tripod: the console said more than there was room for while it could not be logged; what it said then is not here"

// noticeLoss sees that there is no room in the serial log's file system, before punch makes some: what was written since is lost.
func (r *relay) noticeLoss() {
	if r.lostAt > 0 {
		return
	}
	var st unix.Statfs_t
	var err error
	raw, _ := r.serial.SyscallConn()
	if controlErr := raw.Control(func(fd uintptr) { err = unix.Fstatfs(int(fd), &st) }); controlErr != nil || err != nil || st.Bfree > 0 {
		return
	}
	if info, err := r.serial.Stat(); err == nil {
		r.lostAt = info.Size()
	}
}

// entries makes the log's entries of the first n bytes that were read, and tells how many of these they used.
func (b *buffer) entries(n int, last bool) (used int) {
	now, output := time.Now().UTC(), b.in[:n]
	b.out = b.out[:0]
	for len(b.out) < batch { // an entry may be much longer than its line
		line, n := crilog.Cut(output[used:])
		if n == 0 && last && used < len(output) {
			line, n = crilog.Line{Content: output[used:]}, len(output)-used
		}
		if n == 0 {
			break
		}
		line.Time, line.Stream = now, crilog.Stdout
		b.out = line.Append(b.out)
		used += n
	}
	return used
}

// note appends a line that is not the guest's.
func (r *relay) note(text string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return os.ErrClosed
	}
	if r.late {
		if err := r.begin(); err != nil {
			return err
		}
	}
	return r.append(text)
}

// append is note with the lock held.
func (r *relay) append(text string) error {
	line := crilog.Line{Time: time.Now().UTC(), Stream: crilog.Stderr, Content: []byte(text)}
	return r.commit(line.Append(nil), 0)
}

// commit appends the entries to the container's log and writes the offsets. If either fails, the entries are not in the log.
func (r *relay) commit(entries []byte, used int64) error {
	next := r.at
	next.offset += used
	if r.file != nil {
		_, size, err := identify(r.file)
		if err != nil {
			return err
		}
		if size != r.at.logSize { // somebody else cut it off, or wrote to it
			r.at.logSize = size
			if err := writeRecord(r.state, r.at); err != nil {
				return err
			}
		}
		full := r.cfg.LogSizeMax > 0 && size+int64(len(entries)) > r.cfg.LogSizeMax
		r.warnFull(full)
		if full {
			entries = nil
		}
		next.logSize = size + int64(len(entries))
		if err := fpAppend.Hit(context.Background()); err != nil {
			return err
		}
		if _, err := r.file.Write(entries); err != nil {
			return errors.Join(err, r.file.Truncate(r.at.logSize))
		}
	}
	err := fpVouch.Hit(context.Background())
	if err == nil {
		err = writeRecord(r.state, next)
	}
	if err != nil {
		if r.file != nil {
			err = errors.Join(err, r.file.Truncate(r.at.logSize))
		}
		return err
	}
	r.at = next
	return nil
}

// warnFull logs when the container's log gets full, and when there is room again.
func (r *relay) warnFull(full bool) {
	switch {
	case full && !r.full:
		r.log.Warn("the log of a container is as large as it may be: its output is dropped until the log is rotated")
	case !full && r.full:
		r.log.Info("the log of a container has room again")
	}
	r.full = full
}

// punch frees what of the serial log is behind, when it is worth it.
func (r *relay) punch(last bool) {
	end := min(r.at.offset, r.needs()) / punchAlign * punchAlign
	if r.punched < 0 || end <= r.punched || !last && end-r.punched < punchSize {
		return
	}
	var err error
	raw, _ := r.serial.SyscallConn()
	_ = raw.Control(func(fd uintptr) {
		err = unix.Fallocate(int(fd), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, r.punched, end-r.punched)
	})
	if err != nil {
		r.log.Warn("what is logged of a serial log cannot be freed: it grows as long as its machine is there", "path", r.cfg.SerialLog, "err", err)
		r.punched = -1
		return
	}
	r.punched = end
}

// reopen goes on in another log.
func (r *relay) reopen() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return fmt.Errorf("container log: %w", os.ErrClosed)
	}
	if r.late {
		return r.begin()
	}
	file, err := r.cfg.OpenLog()
	if err != nil {
		return err
	}
	old := r.file
	if err := r.use(file); err != nil {
		if file != nil {
			file.Close()
		}
		return err
	}
	if old != nil {
		return old.Close()
	}
	return nil
}

func (r *relay) close() error {
	r.cancel()
	<-r.done
	return r.abandon()
}

// abandon is close for a relay that was not started.
func (r *relay) abandon() error {
	serialLogs.remove(r.cfg.SerialLog, r.wake)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	return r.closeFiles()
}

func (r *relay) closeFiles() (err error) {
	for _, f := range []**os.File{&r.serial, &r.state, &r.file} {
		if *f != nil {
			err = errors.Join(err, (*f).Close())
			*f = nil
		}
	}
	return err
}
