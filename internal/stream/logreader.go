package stream

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"github.com/fsnotify/fsnotify"

	"github.com/tripod-run/tripod/internal/crilog"
)

// LogOptions selects a part of a log.
type LogOptions struct {
	// Follow waits for more lines at the end of the log, across rotations, until the context ends or Ended is closed.
	Follow bool
	// Ended, if not nil, is closed when the container has ended. ReadLogs then reads the rest of the log and returns.
	Ended <-chan struct{}
	// If TailSet is true, only the last Tail lines of the log are read; otherwise all lines are read.
	Tail    int
	TailSet bool
	// Since omits lines that are older than this time.
	Since time.Time
	// Timestamps writes each line's time before the line.
	Timestamps bool
	// Notice, if not nil, is called for the first line that is skipped because it is no line of a log, as after a power loss.
	Notice func(error)
}

// readSize is the size of the read buffer, in bytes. Longer lines are written in parts.
const readSize = 64 << 10

// ReadLogs writes the content of the container's log at path to the two writers; a nil writer discards its stream. It skips
// lines that are not in the CRI's format, as a kubelet does, and returns errdefs.ErrInvalidArgument if there is no other, and
// ErrNotFound if the file does not exist.
func ReadLogs(ctx context.Context, path string, opts LogOptions, stdout, stderr io.Writer) error {
	r := &logReader{path: path, opts: opts, out: map[string]*logSink{
		crilog.Stdout: {w: stdout}, crilog.Stderr: {w: stderr},
	}}
	if opts.Follow {
		watcher, err := fsnotify.NewWatcher()
		if err != nil {
			return fmt.Errorf("follow %s: %w", path, err)
		}
		defer watcher.Close()
		// Watch the directory, because a rotation creates a new file at the path.
		if err := watcher.Add(filepath.Dir(path)); err != nil {
			return fmt.Errorf("follow %s: %w", path, err)
		}
		r.watcher = watcher
	}
	if err := r.open(); err != nil {
		return err
	}
	defer func() {
		r.file.Close()
		if r.next != nil {
			r.next.Close()
		}
	}()
	if opts.TailSet {
		if err := seekTail(r.file, opts.Tail); err != nil {
			return fmt.Errorf("tail of %s: %w", path, err)
		}
	}
	for {
		if err := r.copy(ctx); err != nil {
			return err
		}
		unread, err := r.waitForMore(ctx)
		if !unread || err != nil {
			return err
		}
	}
}

type logReader struct {
	path    string
	opts    LogOptions
	out     map[string]*logSink
	watcher *fsnotify.Watcher

	file  *os.File
	next  *os.File // the file that follows after a rotation; nil until it exists
	buf   *bufio.Reader
	line  []byte // an incomplete entry, at most readSize bytes
	long  *entry // an entry longer than readSize, partly written
	ended bool   // LogOptions.Ended is closed: this is the last read

	skipping bool  // in the middle of a line that is not an entry
	skipped  error // why the first such line is none
	entries  bool  // there was an entry
}

// entry holds what applies to all parts of a log entry.
type entry struct {
	sink    *logSink
	partial bool
}

func (r *logReader) open() error {
	file, err := os.Open(r.path)
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("no log at %s: %w", r.path, errdefs.ErrNotFound)
	}
	if err != nil {
		return err
	}
	r.file, r.buf = file, bufio.NewReaderSize(file, readSize)
	return nil
}

// copy writes everything up to the end of the file.
func (r *logReader) copy(ctx context.Context) error {
	for ctx.Err() == nil {
		part, err := r.buf.ReadSlice('\n')
		switch {
		case err == nil, errors.Is(err, bufio.ErrBufferFull):
			if err := r.writeEntry(part); err != nil {
				return err
			}
		case errors.Is(err, io.EOF):
			return r.keepPart(part)
		default:
			return fmt.Errorf("log %s: %w", r.path, err)
		}
	}
	return ctx.Err()
}

// keepPart keeps a part of an incomplete entry until the file contains the rest of the entry.
func (r *logReader) keepPart(part []byte) error {
	switch {
	case len(part) == 0:
		return nil
	case r.long != nil || len(r.line)+len(part) > readSize:
		return r.writeEntry(part)
	}
	r.line = append(r.line, part...)
	return nil
}

// writeEntry writes an entry, or a part of an entry that is longer than the buffer.
func (r *logReader) writeEntry(part []byte) error {
	if len(r.line) > 0 {
		part = append(r.line, part...)
		r.line = nil
	}
	content, whole := bytes.CutSuffix(part, []byte("\n"))
	if r.skipping {
		r.skipping = !whole
		return nil
	}
	e := r.long
	if e == nil {
		line, err := crilog.Parse(bytes.TrimLeft(content, "\x00")) // which a file system leaves where data was lost
		if err != nil {
			r.skip(err)
			r.skipping = !whole
			return nil
		}
		r.entries = true
		e = &entry{sink: r.out[line.Stream], partial: line.Partial}
		if err := e.sink.begin(line, r.opts); err != nil {
			return err
		}
		content = line.Content
	}
	if r.long = e; whole {
		r.long = nil
	}
	return e.sink.write(content, whole && !e.partial)
}

// skip notes that a line is no entry.
func (r *logReader) skip(why error) {
	if r.skipped != nil {
		return
	}
	r.skipped = fmt.Errorf("log %s: %w", r.path, why)
	if r.opts.Notice != nil {
		r.opts.Notice(r.skipped)
	}
}

// waitForMore waits until there is more to read. It returns false at the end of the log.
func (r *logReader) waitForMore(ctx context.Context) (bool, error) {
	if !r.opts.Follow {
		return false, r.finish()
	}
	for {
		if unread, err := r.rotate(); unread || err != nil {
			return unread, err
		}
		if r.ended {
			return false, r.finish()
		}
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-r.opts.Ended:
			r.ended = true
			return true, nil
		case err := <-r.watcher.Errors:
			// An overflow of the queue loses events, but rotate looks at the files in any case.
			if err != nil && !errors.Is(err, fsnotify.ErrEventOverflow) {
				return false, fmt.Errorf("follow %s: %w", r.path, err)
			}
		case <-r.watcher.Events:
		}
	}
}

// rotate switches to the file that has replaced the current one at the path, once the current file has been read to its
// end and nothing more can be written to it. It reports whether there is more to read.
//
// A writer changes files between two entries, after it has created the next file. So the current file can grow until
// the next one has content, and its size must be read after the next file's: what is appended between the two reads
// would be lost otherwise.
func (r *logReader) rotate() (bool, error) {
	if err := r.openNext(); err != nil {
		return false, err
	}
	complete := r.next != nil && r.ended
	if r.next != nil && !complete {
		next, err := r.next.Stat()
		if err != nil {
			return false, err
		}
		complete = next.Size() > 0
	}
	now, err := r.file.Stat()
	if err != nil {
		return false, err
	}
	at, err := r.file.Seek(0, io.SeekCurrent)
	switch {
	case err != nil:
		return false, err
	case now.Size() > at:
		return true, nil
	case complete:
		if err := r.flush(); err != nil {
			return false, err
		}
		r.file.Close()
		r.file, r.next = r.next, nil
		r.buf.Reset(r.file)
		return true, nil
	case now.Size() < at: // truncated in place
		r.line, r.long, r.skipping = nil, nil, false
		_, err := r.file.Seek(0, io.SeekStart)
		r.buf.Reset(r.file)
		return true, err
	}
	return false, nil
}

// openNext opens the file at the path as the next one, if it is not the current file. The next file stays open, because
// a further rotation can move it away before the current file is complete.
func (r *logReader) openNext() error {
	if r.next != nil {
		return nil
	}
	old, err := r.file.Stat()
	if err != nil {
		return err
	}
	now, err := os.Stat(r.path)
	if err == nil && !os.SameFile(old, now) {
		r.next, err = os.Open(r.path)
	}
	if errors.Is(err, os.ErrNotExist) {
		return nil // renamed and not yet replaced
	}
	return err
}

// flush writes a last entry that lacks its newline. If the entry is invalid, a crash has truncated it, and flush drops
// it.
func (r *logReader) flush() error {
	line := r.line
	r.line, r.long, r.skipping = nil, nil, false
	if _, err := crilog.Parse(line); len(line) == 0 || err != nil {
		return nil
	}
	return r.writeEntry(append(line, '\n'))
}

// finish flushes at the end of the log. A file without any entry is no log.
func (r *logReader) finish() error {
	if err := r.flush(); err != nil {
		return err
	}
	if !r.entries && !r.opts.TailSet {
		return r.skipped
	}
	return nil
}

// logSink writes the lines of one stream.
type logSink struct {
	w      io.Writer
	inLine bool // in the middle of a line
	old    bool // the line is older than LogOptions.Since
}

// begin handles the start of an entry. If the entry starts a line, begin compares the line's time with Since, and
// writes the time if Timestamps is set.
func (s *logSink) begin(line crilog.Line, opts LogOptions) error {
	if s.inLine {
		return nil
	}
	s.inLine = true
	s.old = line.Time.Before(opts.Since)
	if !opts.Timestamps || s.old || s.w == nil {
		return nil
	}
	_, err := fmt.Fprintf(s.w, "%s ", line.Time.Format(crilog.TimeFormat))
	return err
}

func (s *logSink) write(content []byte, endsLine bool) error {
	s.inLine = !endsLine
	if s.w == nil || s.old {
		return nil
	}
	if endsLine {
		content = append(bytes.Clone(content), '\n')
	}
	_, err := s.w.Write(content)
	return err
}
