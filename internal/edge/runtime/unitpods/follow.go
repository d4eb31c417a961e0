package unitpods

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/crilog"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

const (
	oldLogFile = logFile + ".1"
	// pollInterval is the interval at which a follower reads its log even without a notification. While the queue is
	// full, the follower checks at this interval whether to rotate the log.
	pollInterval = time.Second
	// readSize is larger than the longest line of a CRI log (crilog.MaxPiece), in bytes.
	readSize = 64 << 10
)

// follower turns a module's CRI log into messages for the manager, one for each line or piece of a long line. It saves
// its position whenever the manager takes a message, so that a killed daemon loses or repeats only the latest message.
//
//	guest ──▶ worker ──▶ module.log ──read──▶ queue ──Receive──▶ manager
//	                         │ too large: renamed, reopened        └▶ position: file and offset
//	                         └▶ module.log.1 ──read to its end first
//
// If the log is too large again before the old file has been read, the unread rest of the old file is dropped, and a
// message reports how many bytes were dropped.
type follower struct {
	m         *module
	dir       string
	positions *positionFile
	wake      chan struct{}
	done      chan struct{} // closed once the whole log is queued, or the runtime is closed

	file *os.File // the file being read
	at   position // end of the queued lines in file
	rest []byte   // an incomplete line after that
	// old is set while the current file is oldLogFile. final is set once nothing more is written to the current file.
	old, final bool
	// dropped is the number of dropped bytes that are not reported yet.
	dropped int64
}

// newFollower makes a follower of the log in the given directory, and creates the directory if it is missing.
func newFollower(m *module, dir string) (*follower, error) {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, fmt.Errorf("log directory: %w", err)
	}
	positions, err := openPositionFile(m.r.LogDir, filepath.Base(dir))
	if err != nil {
		return nil, fmt.Errorf("log position: %w", err)
	}
	return &follower{m: m, dir: dir, positions: positions, wake: make(chan struct{}, 1), done: make(chan struct{})}, nil
}

// run follows the log until the module has ended and everything is read, or the runtime is closed.
func (f *follower) run() {
	defer close(f.done)
	defer func() {
		if f.file != nil {
			f.file.Close()
		}
	}()
	if err := f.m.r.watch.add(f.dir, f.wake); err != nil {
		f.m.r.log.Debug("cannot watch a module's log; polling it", "module", f.m.uuid, "err", err)
	}
	defer f.m.r.watch.remove(f.dir)
	f.resume()
	tick := time.NewTicker(f.m.r.pollInterval)
	defer tick.Stop()
	for {
		ended := f.m.hasEnded() // before the last read
		err := f.catchUp(ended)
		switch {
		case f.m.r.ctx.Err() != nil:
			return
		case err != nil:
			f.m.r.log.Warn("cannot read a module's log", "module", f.m.uuid, "err", err)
		}
		if ended {
			return
		}
		over := f.m.ended
		select {
		case <-f.wake:
		case <-tick.C:
		case <-over:
		case <-f.m.r.ctx.Done():
			return
		}
	}
}

// remove removes the log and the position.
func (f *follower) remove() error {
	f.positions.close()
	return removeLog(f.m.r.LogDir, filepath.Base(f.dir))
}

// removeLog removes a module's log and the position in the log, if they exist.
func removeLog(logDir, key string) error {
	return errors.Join(os.RemoveAll(filepath.Join(logDir, key)), os.RemoveAll(filepath.Join(logDir, positionsDir, key)))
}

func (f *follower) path() string    { return filepath.Join(f.dir, logFile) }
func (f *follower) oldPath() string { return filepath.Join(f.dir, oldLogFile) }

// resume continues at the position of an earlier daemon. If the old file was not read to its end, resume begins with
// that file.
func (f *follower) resume() {
	at := f.positions.read()
	old, err := os.Open(f.oldPath())
	if err == nil {
		if current, ok := inodeOf(f.path()); ok && current == at.inode {
			old.Close() // the old file has been read
			_ = os.Remove(f.oldPath())
		} else {
			f.begin(old, at)
			f.old, f.final = true, false // the worker writes to the old file until the log is reopened
			return
		}
	}
	if file, err := os.Open(f.path()); err == nil {
		f.begin(file, at)
	}
}

// begin starts reading a file. If the given position belongs to this file, begin starts there, otherwise at the
// beginning of the file.
func (f *follower) begin(file *os.File, at position) {
	if f.file != nil {
		f.file.Close()
	}
	f.file, f.rest, f.old, f.final = file, nil, false, false
	f.at = position{inode: inodeOfFile(file)}
	if f.at.inode == at.inode {
		f.at = at
	}
}

// catchUp reads the log to its current end. If ended is set, nothing more will be written.
func (f *follower) catchUp(ended bool) error {
	for {
		if f.file == nil {
			file, err := os.Open(f.path())
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			} else if err != nil {
				return err
			}
			f.begin(file, position{})
		}
		if f.old && !f.final {
			f.final = f.reopen(ended)
		}
		if err := f.readAll(); err != nil || f.m.r.ctx.Err() != nil {
			return err
		}
		switch {
		case f.old && f.final:
			f.lastLine()
			f.file.Close()
			f.file = nil
		case ended:
			f.lastLine()
			return nil
		case !f.old && f.tooLarge(f.at.offset):
			f.rotate(false)
		default:
			return nil
		}
	}
}

// tooLarge reports whether to rotate a log of this size. A log of up to twice the limit is rotated only if the manager
// has taken the whole old file, because the rotation replaces that file.
func (f *follower) tooLarge(size int64) bool {
	if size <= f.m.r.LogBytes {
		return false
	}
	current, _ := inodeOf(f.path())
	return size > 2*f.m.r.LogBytes || f.positions.read().inode == current
}

// reopen makes the worker open a new file. It reports true if nothing more is written to the old file.
func (f *follower) reopen(ended bool) bool {
	if ended {
		return true
	}
	if err := f.m.r.Node.ReopenLog(f.m.r.ctx, f.m.podID); err != nil {
		f.m.r.log.Debug("cannot reopen a module's log yet; retrying", "module", f.m.uuid, "err", err)
		return false
	}
	return true
}

// rotate renames the log and makes the worker open a new file. If the file of the previous rotation is still being
// read, rotate drops the rest of that file and returns true.
func (f *follower) rotate(ended bool) (dropped bool) {
	if f.old && !f.final { // the worker still writes to the old file
		f.final = f.reopen(ended)
		return false
	}
	if err := os.Rename(f.path(), f.oldPath()); err != nil {
		f.m.r.log.Debug("cannot rotate a module's log", "module", f.m.uuid, "err", err)
		return false
	}
	if !f.old {
		f.old, f.final = true, f.reopen(ended)
		return false
	}
	lost := max(0, f.sizeNow()-f.at.offset)
	file, err := os.Open(f.oldPath())
	if err != nil {
		f.m.r.log.Warn("lost a module's log", "module", f.m.uuid, "err", err)
		return false
	}
	f.begin(file, position{})
	f.old, f.final = true, f.reopen(ended)
	f.m.r.log.Warn("a module writes its log faster than it is read", "module", f.m.uuid, "dropped", lost)
	f.dropped += lost
	return true
}

func (f *follower) sizeNow() int64 {
	info, err := f.file.Stat()
	if err != nil {
		return f.at.offset
	}
	return info.Size()
}

// readAll reads the file to its current end.
func (f *follower) readAll() error {
	buf := make([]byte, readSize)
next:
	for f.m.r.ctx.Err() == nil {
		n, err := f.file.ReadAt(buf, f.at.offset+int64(len(f.rest)))
		data := append(f.rest, buf[:n]...)
		f.rest = nil
		for len(data) > 0 {
			end := bytes.IndexByte(data, '\n')
			if end < 0 && len(data) < readSize {
				break
			}
			line := data
			if end >= 0 {
				line = data[:end+1]
			}
			data = data[len(line):]
			if !f.line(line) {
				continue next // f.file has changed, or the runtime is closed
			}
		}
		f.rest = append([]byte(nil), data...)
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
	return nil
}

// lastLine queues the incomplete last line that remains if the worker dies during a write.
func (f *follower) lastLine() {
	if len(f.rest) > 0 {
		f.line(f.rest)
		f.rest = nil
	}
}

// line queues one entry of the log. It reports false if the entry's file was dropped meanwhile, or the runtime is
// closed.
func (f *follower) line(raw []byte) bool {
	if n := f.dropped; n > 0 {
		f.dropped = 0
		if !f.queue(fmt.Appendf(nil, "tripod: %d bytes of the log were dropped: it was written faster than it was read", n), f.at) {
			f.dropped += n
			return false
		}
	}
	text := raw
	if entry, err := crilog.Parse(raw); err == nil {
		text = entry.Content
	}
	next := position{f.at.inode, f.at.offset + int64(len(raw))}
	if !f.queue(bytes.Clone(text), next) { // rotate has counted the entry as dropped
		return false
	}
	f.at = next
	return true
}

// queue queues a message, together with the position to save once the manager takes the message. While queue waits for
// room, it rotates a log that is too large. It reports false if the rotation has dropped the file, or the runtime is
// closed.
func (f *follower) queue(text []byte, at position) bool {
	message := outgoing{
		Message: channel.Message{Header: channel.Header{Control: true, Module: f.m.index, Arg: wire.ModuleLog}, Payload: text},
		taken:   func() { f.positions.write(at) },
	}
	select {
	case f.m.r.out <- message:
		return true
	default:
	}
	tick := time.NewTicker(f.m.r.pollInterval)
	defer tick.Stop()
	for {
		select {
		case f.m.r.out <- message:
			return true
		case <-f.m.r.ctx.Done():
			return false
		case <-tick.C:
			if info, err := os.Stat(f.path()); err == nil && f.tooLarge(info.Size()) && f.rotate(f.m.hasEnded()) {
				return false
			}
		}
	}
}
