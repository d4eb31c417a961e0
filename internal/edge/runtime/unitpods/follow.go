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
	// lookPause is between two looks at a log of which nothing is heard, and at its size while nobody takes its lines.
	lookPause = time.Second
	// readSize is how much of a log is read at once. The longest line of a CRI log fits (crilog.MaxPiece).
	readSize = 64 << 10
)

// follower turns a module's CRI log into messages for the manager: one for each line, or piece of a long one. Where it is,
// it notes when the manager takes a message, so that an end of the daemon at any line loses and doubles nothing but the
// message that the manager was just given.
//
//	guest ──▶ worker ──▶ module.log ──read──▶ queue ──Receive──▶ manager
//	                         │ too large: renamed, begun anew      └▶ position: which file, how far
//	                         └▶ module.log.1 ──read to its end first
//
// A log that is too large again before the one before has been read costs that one's rest; the manager is told how much.
type follower struct {
	m    *module
	dir  string
	mark *mark
	wake chan struct{}
	done chan struct{} // closed when all has been queued, or the runtime was closed

	file *os.File // what is read now
	at   position // how far
	rest []byte   // what has been read beyond it, less than a line
	// old says that file is oldLogFile, final that nothing more is written to it.
	old, final bool
	// dropped is how many bytes were given up of which the manager has not been told.
	dropped int64
}

// newFollower makes the follower of a log in a directory, which it makes.
func newFollower(m *module, dir string) (*follower, error) {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, fmt.Errorf("log directory: %w", err)
	}
	mark, err := openMark(m.r.LogDir, filepath.Base(dir))
	if err != nil {
		return nil, fmt.Errorf("log position: %w", err)
	}
	return &follower{m: m, dir: dir, mark: mark, wake: make(chan struct{}, 1), done: make(chan struct{})}, nil
}

// run follows the log until the module has ended and all is read, or the runtime is closed.
func (f *follower) run() {
	defer close(f.done)
	defer func() {
		if f.file != nil {
			f.file.Close()
		}
	}()
	if err := f.m.r.watch.add(f.dir, f.wake); err != nil {
		f.m.r.log.Debug("a module's log is looked at once a second", "module", f.m.uuid, "err", err)
	}
	defer f.m.r.watch.remove(f.dir)
	f.resume()
	tick := time.NewTicker(f.m.r.lookPause)
	defer tick.Stop()
	for {
		ended := f.m.hasEnded() // before the last look
		err := f.catchUp(ended)
		switch {
		case f.m.r.ctx.Err() != nil:
			return
		case err != nil:
			f.m.r.log.Warn("a module's log cannot be read", "module", f.m.uuid, "err", err)
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

// remove removes the files.
func (f *follower) remove() error {
	f.mark.close()
	return removeLog(f.m.r.LogDir, filepath.Base(f.dir))
}

// removeLog removes a module's log and the position in it; there need be none.
func removeLog(logDir, key string) error {
	return errors.Join(os.RemoveAll(filepath.Join(logDir, key)), os.RemoveAll(filepath.Join(logDir, positionsDir, key)))
}

func (f *follower) path() string    { return filepath.Join(f.dir, logFile) }
func (f *follower) oldPath() string { return filepath.Join(f.dir, oldLogFile) }

// resume goes to where an earlier daemon was: in the old file, when it had not been read to its end.
func (f *follower) resume() {
	at := f.mark.read()
	old, err := os.Open(f.oldPath())
	if err == nil {
		if current, ok := inodeOf(f.path()); ok && current == at.inode {
			old.Close() // it has been read
			_ = os.Remove(f.oldPath())
		} else {
			f.begin(old, at)
			f.old, f.final = true, false // it may be written to until the log is opened anew
			return
		}
	}
	if file, err := os.Open(f.path()); err == nil {
		f.begin(file, at)
	}
}

// begin reads a file from where at says, when that is about this file, else from its beginning.
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

// catchUp reads all that there is. ended says that nothing more will come.
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

// tooLarge tells whether the log is to be begun anew at its size of now: with twice the limit always, with the limit when
// the manager has taken all of the log before, which goes with the rotation.
func (f *follower) tooLarge(size int64) bool {
	if size <= f.m.r.LogBytes {
		return false
	}
	current, _ := inodeOf(f.path())
	return size > 2*f.m.r.LogBytes || f.mark.read().inode == current
}

// reopen has the worker begin a new file; true when nothing more is written to the old one.
func (f *follower) reopen(ended bool) bool {
	if ended {
		return true
	}
	if err := f.m.r.Node.ReopenLog(f.m.r.ctx, f.m.podID); err != nil {
		f.m.r.log.Debug("a module's log is not reopened yet, to be retried", "module", f.m.uuid, "err", err)
		return false
	}
	return true
}

// rotate renames the log, which the worker then begins anew. What was read from until now is read to its end before,
// unless it is the log of the rotation before: that is given up, and true.
func (f *follower) rotate(ended bool) (gaveUp bool) {
	if f.old && !f.final { // the worker writes to it still
		f.final = f.reopen(ended)
		return false
	}
	if err := os.Rename(f.path(), f.oldPath()); err != nil {
		f.m.r.log.Debug("a module's log is not rotated", "module", f.m.uuid, "err", err)
		return false
	}
	if !f.old {
		f.old, f.final = true, f.reopen(ended)
		return false
	}
	lost := max(0, f.sizeNow()-f.at.offset)
	file, err := os.Open(f.oldPath())
	if err != nil {
		f.m.r.log.Warn("a module's log is lost", "module", f.m.uuid, "err", err)
		return false
	}
	f.begin(file, position{})
	f.old, f.final = true, f.reopen(ended)
	f.m.r.log.Warn("a module writes more log than is read", "module", f.m.uuid, "dropped", lost)
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

// readAll reads the file to its present end.
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
				continue next // with another file, or not at all
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

// lastLine takes what has no newline and will get none: the worker died while it wrote.
func (f *follower) lastLine() {
	if len(f.rest) > 0 {
		f.line(f.rest)
		f.rest = nil
	}
}

// line queues one entry of the log; false when the file that it is of was given up meanwhile, or the runtime closed.
func (f *follower) line(raw []byte) bool {
	if n := f.dropped; n > 0 {
		f.dropped = 0
		if !f.say(fmt.Appendf(nil, "tripod: %d bytes of the log were dropped: it was written faster than it was read", n), f.at) {
			f.dropped += n
			return false
		}
	}
	text := raw
	if entry, err := crilog.Parse(raw); err == nil {
		text = entry.Content
	}
	beyond := position{f.at.inode, f.at.offset + int64(len(raw))}
	if !f.say(bytes.Clone(text), beyond) { // when its file was given up, it was counted with the rest
		return false
	}
	f.at = beyond
	return true
}

// say queues a message; at is where the log is when it has been taken. While nobody takes it the log may be rotated.
func (f *follower) say(text []byte, at position) bool {
	message := outgoing{
		Message: channel.Message{Header: channel.Header{Control: true, Module: f.m.index, Arg: wire.ModuleLog}, Payload: text},
		handed:  func() { f.mark.write(at) },
	}
	select {
	case f.m.r.out <- message:
		return true
	default:
	}
	tick := time.NewTicker(f.m.r.lookPause)
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
