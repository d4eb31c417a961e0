package stream

import (
	"bytes"
	"errors"
	"io"
	"os"

	"github.com/tripod-run/tripod/internal/crilog"
)

// seekTail sets the file's position to the start of its last n lines. All entries of a long line count as one line.
func seekTail(file *os.File, n int) error {
	end, err := file.Seek(0, io.SeekEnd)
	if err != nil || n <= 0 {
		return err
	}
	start, err := tailStart(file, end, n)
	if err != nil {
		return err
	}
	_, err = file.Seek(start, io.SeekStart)
	return err
}

// tailStart returns the offset of the last n lines. It walks backwards until it finds the entry that ends the preceding
// line.
func tailStart(file io.ReaderAt, end int64, n int) (int64, error) {
	next := end // the offset of the following entry
	for start, err := range entriesBackwards(file, end) {
		if err != nil {
			return 0, err
		}
		ends, err := endsLine(file, start)
		if err != nil {
			return 0, err
		}
		if ends || next == end {
			if n == 0 {
				return next, nil
			}
			n--
		}
		next = start
	}
	return 0, nil
}

// entriesBackwards yields the offsets of the file's entries, last first.
func entriesBackwards(file io.ReaderAt, end int64) func(yield func(int64, error) bool) {
	return func(yield func(int64, error) bool) {
		block := make([]byte, readSize)
		for pos := end; pos > 0; {
			size := min(pos, int64(len(block)))
			pos -= size
			if _, err := file.ReadAt(block[:size], pos); err != nil {
				yield(0, err)
				return
			}
			for i := size; ; {
				i = int64(bytes.LastIndexByte(block[:i], '\n'))
				if i < 0 {
					break
				}
				if start := pos + i + 1; start < end && !yield(start, nil) {
					return
				}
			}
		}
		if end > 0 {
			yield(0, nil)
		}
	}
}

// endsLine reports whether the entry at start ends a line. If the bytes at start are not an entry, endsLine returns
// true.
func endsLine(file io.ReaderAt, start int64) (bool, error) {
	var head [80]byte // long enough for the time, the stream and the tag
	n, err := file.ReadAt(head[:], start)
	if err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	line, _, _ := bytes.Cut(head[:n], []byte("\n"))
	entry, err := crilog.Parse(line)
	return err != nil || !entry.Partial, nil
}
