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
	// batch is the maximum number of bytes to read from the serial log in a step. A step writes at most about the same
	// number to the container's log.
	batch = 64 << 10
	// gather is how long the relay waits for more output before it copies. More output usually follows, because a guest
	// writes to its console byte by byte.
	gather = 10 * time.Millisecond
	// retry is the pause after a failed write, and between polls if inotify does not work.
	retry = time.Second
	// punchSize is the minimum number of bytes to free at once in the serial log. punchAlign is a file system's block
	// size.
	punchSize, punchAlign = 256 << 10, 4 << 10
)

// buffers are shared, because most relays are idle.
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

	mu         sync.Mutex
	serial     *os.File
	state      *os.File
	file       *os.File // the container's log; nil if it has none
	committed  record
	punched    int64 // the end of the freed part of the serial log; -1 if the file system cannot free parts
	logPending bool  // the container's log must still be opened
	full       bool  // the container's log has reached LogSizeMax
	lostAt     int64 // the size of the serial log when its file system was found full, otherwise 0
	closed     bool
}

func openRelay(cfg Config) (*relay, error) {
	cfg.SerialLog = filepath.Clean(cfg.SerialLog) // as in inotify's events
	r := &relay{cfg: cfg, log: cfg.Logger, wake: make(chan struct{}, 1), done: make(chan struct{})}
	if err := r.open(); err != nil {
		_ = r.closeFiles()
		return nil, err
	}
	if err := serialLogs.add(cfg.SerialLog, r.wake); err != nil {
		r.log.Warn("inotify does not work; polling the serial log every second", "path", cfg.SerialLog, "err", err)
		r.poll = true
	}
	return r, nil
}

// start starts the goroutine that copies.
func (r *relay) start() {
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	go r.run(ctx)
}

// run copies output until ctx ends.
func (r *relay) run(ctx context.Context) {
	defer close(r.done)
	failing := false
	for ctx.Err() == nil {
		err := r.catchUp(ctx, false)
		if err != nil != failing {
			if failing = err != nil; failing {
				r.log.Warn("cannot log a console's output; will retry", "path", r.cfg.SerialLog, "err", err)
			} else {
				r.log.Info("a console's output is logged again", "path", r.cfg.SerialLog)
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

// drain copies all output, including an unfinished last line. If that fails, drain retries until ctx ends.
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

// catchUp copies all output so far. If last is true, this includes an unfinished line.
func (r *relay) catchUp(ctx context.Context, last bool) error {
	for ctx.Err() == nil {
		if more, err := r.step(last); err != nil || !more {
			return err
		}
	}
	return ctx.Err()
}

// step copies a batch. It returns true if it copied anything, because there may then be more to copy.
func (r *relay) step(last bool) (more bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false, os.ErrClosed
	}
	if r.logPending {
		if err := r.openLog(); err != nil {
			return false, err
		}
	}
	b := buffers.Get().(*buffer)
	defer buffers.Put(b)
	n, err := r.serial.ReadAt(b.in, r.committed.offset)
	if err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	used := b.entries(n, (last || r.cfg.TTY) && errors.Is(err, io.EOF), !last)
	if used > 0 {
		if err := r.commit(b.out, int64(used)); err != nil {
			return false, err
		}
	}
	r.noticeLoss()
	if r.lostAt > 0 && (used == 0 || r.committed.offset >= r.lostAt) {
		if err := r.append(lossNote); err != nil {
			return false, err
		}
		r.lostAt, last = 0, true // free space immediately
	}
	r.punch(last)
	return used > 0, nil
}

// lossNote is the line in the container's log where output may be missing.
const lossNote = "tripod: the console's output could not be logged, and its buffer was full; some output is missing here"

// noticeLoss sets lostAt if the serial log's file system is full and QEMU therefore loses output. Call it before punch.
func (r *relay) noticeLoss() {
	if r.lostAt > 0 {
		return
	}
	var st unix.Statfs_t
	if err := withFD(r.serial, func(fd int) error { return unix.Fstatfs(fd, &st) }); err != nil || st.Bfree > 0 {
		return
	}
	if info, err := r.serial.Stat(); err == nil {
		r.lostAt = info.Size()
	}
}

// entries converts the first n bytes of b.in to log entries in b.out, and returns how many bytes it converted. If rest
// is true, it also converts an unfinished line, which goes on in the next entry if partial is true.
func (b *buffer) entries(n int, rest, partial bool) (used int) {
	now, output := time.Now().UTC(), b.in[:n]
	b.out = b.out[:0]
	for len(b.out) < batch { // an entry can be much longer than its line
		line, n := crilog.Cut(output[used:])
		if n == 0 && rest && used < len(output) {
			line, n = crilog.Line{Content: output[used:], Partial: partial}, len(output)-used
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

// note appends a line to the container's log.
func (r *relay) note(text string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return os.ErrClosed
	}
	if r.logPending {
		if err := r.openLog(); err != nil {
			return err
		}
	}
	return r.append(text)
}

// append appends a line to the container's log. The caller holds mu.
func (r *relay) append(text string) error {
	line := crilog.Line{Time: time.Now().UTC(), Stream: crilog.Stderr, Content: []byte(text)}
	return r.commit(line.Append(nil), 0)
}

// commit appends entries to the container's log and advances the committed offset by the given number of bytes. If
// either fails, commit undoes both.
func (r *relay) commit(entries []byte, used int64) error {
	next := r.committed
	next.offset += used
	if r.file != nil {
		_, size, err := identify(r.file)
		if err != nil {
			return err
		}
		if size != r.committed.logSize { // another program truncated the log, or wrote to it
			r.committed.logSize = size
			if err := writeRecord(r.state, r.committed); err != nil {
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
			return errors.Join(err, r.file.Truncate(r.committed.logSize))
		}
	}
	err := fpVouch.Hit(context.Background())
	if err == nil {
		err = writeRecord(r.state, next)
	}
	if err != nil {
		if r.file != nil {
			err = errors.Join(err, r.file.Truncate(r.committed.logSize))
		}
		return err
	}
	r.committed = next
	return nil
}

// warnFull writes a message to the daemon's log when the container's log reaches LogSizeMax, and another when the
// container's log has room again.
func (r *relay) warnFull(full bool) {
	switch {
	case full && !r.full:
		r.log.Warn("container log has reached its maximum size; dropping output until the log is rotated")
	case !full && r.full:
		r.log.Info("container log has room again")
	}
	r.full = full
}

// punch frees the part of the serial log that is no longer needed, if the part has at least punchSize bytes or last is
// true.
func (r *relay) punch(last bool) {
	end := min(r.committed.offset, lockedFrom(r.serial)) / punchAlign * punchAlign
	if r.punched < 0 || end <= r.punched || !last && end-r.punched < punchSize {
		return
	}
	err := withFD(r.serial, func(fd int) error {
		return unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, r.punched, end-r.punched)
	})
	if err != nil {
		r.log.Warn("cannot free the logged part of a serial log; it grows until its machine is removed", "path", r.cfg.SerialLog, "err", err)
		r.punched = -1
		return
	}
	r.punched = end
}

// reopen opens the container's log again and continues in the new file.
func (r *relay) reopen() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return fmt.Errorf("container log: %w", os.ErrClosed)
	}
	if r.logPending {
		return r.openLog()
	}
	file, err := r.cfg.OpenLog()
	if err != nil {
		return err
	}
	old := r.file
	if err := r.setLog(file); err != nil {
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
	return r.release()
}

// release closes a relay whose method run has not started yet or has already returned.
func (r *relay) release() error {
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
