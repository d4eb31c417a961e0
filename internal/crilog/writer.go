package crilog

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// Writer writes a container's log file. Several goroutines may use a Writer at the same time, but only one may use each
// of its streams.
type Writer struct {
	now func() time.Time

	max int64 // largest size of the file, in bytes; 0 means no limit

	mu   sync.Mutex
	file *os.File
	buf  []byte
}

// ErrFull is the error for lines that would make the file larger than its limit. The Writer drops such lines until a
// rotation makes room.
var ErrFull = errors.New("the container log has reached its size limit")

// NewWriter makes a writer that owns the given file, which must be open for appending. max is the largest size of the
// log file, in bytes; 0 means no limit.
func NewWriter(file *os.File, max int64) *Writer {
	return &Writer{now: time.Now, file: file, max: max}
}

// Replace rotates the log: it closes the current file and continues with the given file, which the writer then owns. If
// Close was called before, Replace only closes the given file and returns os.ErrClosed.
func (l *Writer) Replace(file *os.File) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		file.Close()
		return fmt.Errorf("container log: %w", os.ErrClosed)
	}
	old := l.file
	l.file = file
	return old.Close()
}

// Close closes the file. Close the streams first, because they may hold an unfinished line.
func (l *Writer) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		return nil
	}
	file := l.file
	l.file = nil
	return file.Close()
}

// Stream returns a writer for Stdout or Stderr. The returned writer writes a line to the log when the line is complete
// or has MaxPiece bytes. When the returned writer is closed, it writes the rest as a full line.
func (l *Writer) Stream(name string) io.WriteCloser { return &stream{log: l, name: name} }

// Terminal is like Stream for the output of a program on a terminal: the returned writer writes each part of a line at once, so
// that whoever follows the log sees prompts.
func (l *Writer) Terminal(name string) io.WriteCloser {
	return &stream{log: l, name: name, atOnce: true}
}

type stream struct {
	log    *Writer
	name   string
	atOnce bool   // write unfinished lines, too
	rest   []byte // an unfinished line, at most MaxPiece bytes
}

func (s *stream) Write(p []byte) (int, error) {
	output := append(s.rest, p...)
	var lines []Line
	for {
		line, n := Cut(output)
		if n == 0 && s.atOnce && len(output) > 0 {
			line, n = Line{Content: output, Partial: true}, len(output)
		}
		if n == 0 {
			break
		}
		lines = append(lines, line)
		output = output[n:]
	}
	if len(lines) == 0 {
		s.rest = output
		return len(p), nil
	}
	rest := append([]byte(nil), output...)
	if err := s.log.write(s.name, lines); err != nil {
		return 0, err
	}
	s.rest = rest
	return len(p), nil
}

func (s *stream) Close() error {
	if len(s.rest) == 0 {
		return nil
	}
	line := Line{Content: s.rest}
	s.rest = nil
	return s.log.write(s.name, []Line{line})
}

// write appends all lines of one Write call in one system call, so that readers rarely see half a line, even after a
// crash.
func (l *Writer) write(name string, lines []Line) error {
	if len(lines) == 0 {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		return fmt.Errorf("container log: %w", os.ErrClosed)
	}
	now := l.now().UTC()
	l.buf = l.buf[:0]
	for _, line := range lines {
		line.Time, line.Stream = now, name
		l.buf = line.Append(l.buf)
	}
	if l.max > 0 {
		info, err := l.file.Stat()
		if err != nil {
			return err
		}
		if info.Size()+int64(len(l.buf)) > l.max {
			return ErrFull
		}
	}
	_, err := l.file.Write(l.buf)
	return err
}
