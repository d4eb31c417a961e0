package guestlog

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/atomicfile"
	"github.com/tripod-run/tripod/internal/crilog"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
	"github.com/tripod-run/tripod/internal/stream"
)

const (
	// maxLine is the largest entry of a log in bytes: its content, and the time, the stream and the tag.
	maxLine = crilog.MaxPiece + 256
	// markStep is the number of bytes of a log after which the cursor is written.
	markStep = 1 << 20
	// pauseMin and pauseMax limit the pause before a copy that was interrupted is continued.
	pauseMin, pauseMax = 20 * time.Millisecond, 5 * time.Second
)

// Log copies a container's log from the guest, where conmon writes it, to the log file on the node. The guest keeps
// what the node does not have. The cursor file says how much that is, so that a daemon that was killed continues at the
// right byte:
//
//	guest   ─────────────────────────┬──────────▶     Offset at the time of the cursor
//	node    ──── earlier files ──────┴────▶           Size of the file with inode Inode at that time
//
// Only the daemon appends to the file. So whatever the file has beyond Size, it has from beyond Offset. An entry that is dropped
// breaks that, so the cursor is written before the next one is added. The guest may free only what the cursor and the file say
// that the node has.
type Log struct {
	pod       *sandbox.Pod
	container *sandbox.Container
	cursor    string
	max       int64
	log       *slog.Logger
	// end ends Follow; done is closed when Follow has returned. whole is set if the log is then complete.
	end   chan struct{}
	once  sync.Once
	done  chan struct{}
	whole atomic.Bool

	mu     sync.Mutex
	opened bool
	closed bool
	file   *os.File // nil if the container has no log, or once it is closed
	size   int64
	offset int64 // where the copy continues
	kept   int64 // where a next daemon would continue; less than offset if entries were dropped since the cursor was written
	marked int64 // the offset when the cursor was last to be written
	full   bool
	// copying is the copy that may add entries. What an earlier one receives late, the current one receives again.
	copying *call
}

// Source sends a container's log from an offset on until the log is complete, and reads what the node acknowledges. It is one call
// of guestapi.MethodLog.
type Source func(ctx context.Context, offset int64, acks io.Reader, out io.Writer) error

// call is one call of a Source.
type call struct{ _ byte }

var errLateEntry = errors.New("the entry belongs to a call that has ended")

// cursor is the content of a cursor file.
type cursor struct {
	Offset int64  `json:"offset"`
	Inode  uint64 `json:"inode"`
	Size   int64  `json:"size"`
}

// New returns the log of a container, which is not open.
func New(p *sandbox.Pod, c *sandbox.Container, cursor string, limit int64, log *slog.Logger) *Log {
	return &Log{pod: p, container: c, cursor: cursor, max: limit, log: log, end: make(chan struct{}), done: make(chan struct{})}
}

// Open opens the log file, unless it is open, and finds out how much of the guest's log the node has.
func (g *Log) Open() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.opened {
		return nil
	}
	return g.resume()
}

// resume does the work of Open. The caller holds mu.
func (g *Log) resume() error {
	if g.closed {
		return fmt.Errorf("the log of container %s has ended: %w", g.container.ID, errdefs.ErrFailedPrecondition)
	}
	var mark cursor
	raw, err := os.ReadFile(g.cursor)
	if err == nil {
		err = json.Unmarshal(raw, &mark)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("the position in the log of container %s: %w", g.container.ID, err)
	}
	size, err := g.wholeSize(mark)
	if err != nil {
		return err
	}
	g.offset = mark.Offset + max(size-mark.Size, 0)
	if err := g.replaceFile(); err != nil {
		return err
	}
	g.opened = true
	return nil
}

// wholeSize returns the size of the log file of the cursor, or 0 if it is gone, and cuts off a part of an entry at its end. A
// kubelet renames the file before it asks for a new one.
func (g *Log) wholeSize(mark cursor) (int64, error) {
	path, err := stream.LogPath(g.pod.Config.GetLogDirectory(), g.container.Config.GetLogPath())
	if err != nil || path == "" || mark.Inode == 0 {
		return 0, nil
	}
	names, _ := filepath.Glob(filepath.Join(filepath.Dir(path), "*"))
	for _, name := range append([]string{path}, names...) {
		var st unix.Stat_t
		if unix.Lstat(name, &st) != nil || st.Ino != mark.Inode || st.Mode&unix.S_IFMT != unix.S_IFREG {
			continue
		}
		file, err := os.OpenFile(name, os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
		if err != nil {
			return 0, err
		}
		defer file.Close()
		return cutEntry(file, mark.Size)
	}
	return 0, nil
}

// cutEntry cuts off a part of an entry at the end of a log, which a daemon leaves that is killed while it writes. It cuts off
// nothing below the given size, and returns the file's size.
func cutEntry(file *os.File, from int64) (int64, error) {
	info, err := file.Stat()
	if err != nil {
		return 0, err
	}
	size := info.Size()
	start := max(from, size-maxLine)
	if start >= size {
		return size, nil
	}
	tail := make([]byte, size-start)
	if _, err := file.ReadAt(tail, start); err != nil {
		return 0, err
	}
	end := start + int64(bytes.LastIndexByte(tail, '\n')) + 1
	if end == size || end == start && start > from { // whole, or not a part of an entry, which would be shorter
		return size, nil
	}
	return end, sandbox.DiskError(file.Truncate(end))
}

// Reopen continues with a new file at the log's path. It returns errdefs.ErrFailedPrecondition once the log is closed.
func (g *Log) Reopen() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.opened || g.closed {
		return g.resume()
	}
	return g.replaceFile()
}

// replaceFile opens the file at the log's path. The caller holds mu.
func (g *Log) replaceFile() error {
	file, err := stream.OpenLogFile(g.pod.Config.GetLogDirectory(), g.container.Config.GetLogPath())
	if err != nil {
		return err
	}
	if g.file != nil {
		g.file.Close()
	}
	g.file, g.size, g.full = file, 0, false
	if file != nil {
		info, err := file.Stat()
		if err != nil {
			return err
		}
		g.size = info.Size()
	}
	return g.mark()
}

// mark writes the cursor.
func (g *Log) mark() error {
	m := cursor{Offset: g.offset, Size: g.size}
	if g.file != nil {
		var st unix.Stat_t
		if err := unix.Fstat(int(g.file.Fd()), &st); err != nil {
			return err
		}
		m.Inode = st.Ino
	}
	raw, err := json.Marshal(m)
	if err != nil {
		return err
	}
	g.marked = g.offset
	if err := atomicfile.Replace(g.cursor, raw, 0o600); err != nil {
		return sandbox.DiskError(err)
	}
	g.kept = g.offset
	return nil
}

// add appends an entry of the guest's log. What is not an entry, or no longer fits, is dropped.
func (g *Log) add(by *call, line []byte) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if by != g.copying {
		return errLateEntry
	}
	dropped := g.file == nil || g.full
	if !dropped {
		_, err := crilog.Parse(line)
		dropped = err != nil
	}
	if !dropped && g.max > 0 && g.size+int64(len(line)) > g.max {
		g.full, dropped = true, true
		g.log.Warn("the log of a container is full; its output is dropped until the log is rotated", "container", g.container.ID, "bytes", g.size)
	}
	if dropped {
		g.offset += int64(len(line))
	} else if err := g.write(line); err != nil {
		return err
	}
	if g.offset-g.marked >= markStep {
		return g.mark()
	}
	return nil
}

// write appends an entry to the file. The caller holds mu.
func (g *Log) write(line []byte) error {
	if g.kept < g.offset {
		if err := g.mark(); err != nil {
			return err
		}
	}
	if _, err := g.file.Write(line); err != nil { // the disk is full: the guest sends the entry again later
		return errors.Join(err, g.file.Truncate(g.size))
	}
	g.size += int64(len(line))
	g.offset += int64(len(line))
	g.kept = g.offset
	return nil
}

// Follow copies the log until it is complete.
func (g *Log) Follow(ctx context.Context, source Source) {
	defer close(g.done)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-g.end:
			cancel()
		case <-ctx.Done():
		}
	}()
	for pause := pauseMin; ; pause = min(2*pause, pauseMax) {
		err := g.Open()
		before := g.position()
		if err == nil {
			err = g.copy(ctx, source)
		}
		if g.position() != before {
			pause = pauseMin
		}
		if err == nil {
			g.whole.Store(true)
			return
		}
		if ctx.Err() != nil {
			return
		}
		g.log.Debug("the log of a container is interrupted", "container", g.container.ID, "err", err)
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
	}
}

// begin makes a copy the current one, and returns the offset at which it begins. nil ends the current copy.
func (g *Log) begin(by *call) int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.copying = by
	return g.offset
}

// copy copies the log until it is complete or the connection ends.
func (g *Log) copy(ctx context.Context, source Source) error {
	current := new(call)
	offset := g.begin(current)
	defer g.begin(nil)
	acks, ack := io.Pipe()
	defer ack.Close()
	received, done := make(chan struct{}, 1), make(chan struct{})
	defer close(done)
	go g.acknowledge(ack, received, done)
	out := &guestapi.Lines{Limit: maxLine, Line: func(line []byte) error {
		if err := g.add(current, line); err != nil {
			return err
		}
		select {
		case received <- struct{}{}:
		default:
		}
		return nil
	}}
	return source(ctx, offset, acks, out)
}

// acknowledge tells the guest what the node has, each time that something was received.
func (g *Log) acknowledge(to io.Writer, received, done <-chan struct{}) {
	for send := json.NewEncoder(to); ; {
		select {
		case <-received:
		case <-done:
			return
		}
		g.mu.Lock()
		at := g.kept
		g.mu.Unlock()
		if send.Encode(guestapi.Ack{Offset: at}) != nil {
			return
		}
	}
}

// Stop ends Follow.
func (g *Log) Stop() { g.once.Do(func() { close(g.end) }) }

// Await waits until the log is complete, and then ends Follow. It waits at most the time limit, and less if nothing arrives for
// the time idle.
func (g *Log) Await(idle, limit time.Duration) {
	over := time.After(limit)
	for last, now := int64(-1), g.position(); last != now; last, now = now, g.position() {
		select {
		case <-g.done:
			return
		case <-time.After(idle):
			continue
		case <-over:
		}
		break
	}
	g.Stop()
	<-g.done
}

// position returns the offset in the guest's log up to which everything is received.
func (g *Log) position() int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.offset
}

// Close closes the file.
func (g *Log) Close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	if g.kept < g.offset {
		if err := g.mark(); err != nil {
			g.log.Warn("cannot record what a log has; a next daemon reads dropped entries again", "container", g.container.ID, "err", err)
		}
	}
	if g.file != nil {
		g.file.Close()
		g.file = nil
	}
}

// Whole reports whether the log is complete on the node.
func (g *Log) Whole() bool { return g.whole.Load() }
