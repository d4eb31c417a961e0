package stream

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// LogWriter writes a container's log file in the CRI's format. It may be used from many goroutines; each of its
// streams from one at a time.
type LogWriter struct {
	path string
	now  func() time.Time

	mu   sync.Mutex
	file *os.File
	buf  []byte
}

// NewLogWriter opens, and creates if need be, the log file at path. Its directory must be there.
func NewLogWriter(path string) (*LogWriter, error) {
	file, err := openLog(path)
	if err != nil {
		return nil, err
	}
	return &LogWriter{path: path, now: time.Now, file: file}, nil
}

// openLog follows no symbolic link in the last element: the directory may be writable to others than the node.
func openLog(path string) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|unix.O_NOFOLLOW, 0o640)
	if err != nil {
		return nil, fmt.Errorf("container log: %w", err)
	}
	return file, nil
}

// Reopen closes the file and opens the one that is now at the path, after a rotation. When it fails the old one is
// written on.
func (l *LogWriter) Reopen() error {
	file, err := openLog(l.path)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		file.Close()
		return fmt.Errorf("container log %s: %w", l.path, os.ErrClosed)
	}
	old := l.file
	l.file = file
	return old.Close()
}

// Close closes the file. Close the streams first: they may hold the beginning of a line.
func (l *LogWriter) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		return nil
	}
	file := l.file
	l.file = nil
	return file.Close()
}

// Stream is the writer for Stdout or Stderr. A line is written when its end is, or MaxLogPiece of it; Close writes what
// is left, as a full line.
func (l *LogWriter) Stream(name string) io.WriteCloser { return &logStream{log: l, name: name} }

type logStream struct {
	log  *LogWriter
	name string
	rest []byte // the beginning of a line, less than MaxLogPiece
}

func (s *logStream) Write(p []byte) (int, error) {
	written := len(p)
	var lines []LogLine
	for len(p) > 0 {
		room := MaxLogPiece - len(s.rest)
		end := bytes.IndexByte(p[:min(room+1, len(p))], '\n')
		switch {
		case end >= 0: // a line that just fits is whole
			lines = append(lines, LogLine{Content: s.join(p[:end])})
			p = p[end+1:]
		case len(p) <= room:
			s.rest = append(s.rest, p...)
			p = nil
		default:
			lines = append(lines, LogLine{Content: s.join(p[:room]), Partial: true})
			p = p[room:]
		}
	}
	if err := s.log.write(s.name, lines); err != nil {
		return 0, err
	}
	return written, nil
}

// join is the held beginning of the line with more of it, and nothing is held then.
func (s *logStream) join(more []byte) []byte {
	if len(s.rest) == 0 {
		return more
	}
	line := append(s.rest, more...)
	s.rest = nil
	return line
}

func (s *logStream) Close() error {
	if len(s.rest) == 0 {
		return nil
	}
	return s.log.write(s.name, []LogLine{{Content: s.join(nil)}})
}

// write appends the lines of one Write by one system call, so that a reader, or a crash, meets few half lines.
func (l *LogWriter) write(stream string, lines []LogLine) error {
	if len(lines) == 0 {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		return fmt.Errorf("container log %s: %w", l.path, os.ErrClosed)
	}
	now := l.now().UTC()
	l.buf = l.buf[:0]
	for _, line := range lines {
		line.Time, line.Stream = now, stream
		l.buf = line.append(l.buf)
	}
	_, err := l.file.Write(l.buf)
	return err
}
