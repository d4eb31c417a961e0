package dataplane

import (
	"bytes"
	"errors"
	"io"
	"slices"
	"sync"

	"github.com/klauspost/compress/gzip"
)

// buffer is a byte slice that is used again.
type buffer struct{ bytes []byte }

var buffers = sync.Pool{New: func() any { return &buffer{bytes: make([]byte, 0, 1024)} }}

const (
	// keepUpTo is the capacity up to which buffers are kept for later.
	keepUpTo = 5 << 20
	// growBy is how far a buffer runs ahead of what has arrived: a prefix that announces 4 MiB costs nothing yet.
	growBy = 64 << 10
)

func getBuffer() *buffer { return buffers.Get().(*buffer) }

func (b *buffer) free() {
	if b != nil && cap(b.bytes) <= keepUpTo {
		buffers.Put(b)
	}
}

// room makes the buffer n bytes long.
func (b *buffer) room(n int) []byte {
	b.bytes = slices.Grow(b.bytes[:0], n)[:n]
	return b.bytes
}

// readFrom fills the buffer with n bytes of r; io.ErrUnexpectedEOF, or io.EOF, when there are fewer.
func (b *buffer) readFrom(r io.Reader, n int) error {
	b.bytes = b.bytes[:0]
	for step := growBy; len(b.bytes) < n; step *= 4 {
		have := len(b.bytes)
		want := min(n-have, step)
		b.bytes = slices.Grow(b.bytes, want)[:have+want]
		if _, err := io.ReadFull(r, b.bytes[have:]); err != nil {
			return err
		}
	}
	return nil
}

// Write appends; gzip writers use it.
func (b *buffer) Write(p []byte) (int, error) {
	b.bytes = append(b.bytes, p...)
	return len(p), nil
}

var (
	gzipWriters = sync.Pool{New: func() any { return gzip.NewWriter(io.Discard) }}
	gzipReaders = sync.Pool{New: func() any { return new(gzip.Reader) }}
	errTooLong  = errors.New("too long")
)

// gzipTo appends message to b, compressed.
func gzipTo(b *buffer, message []byte) error {
	w := gzipWriters.Get().(*gzip.Writer)
	defer gzipWriters.Put(w)
	w.Reset(b)
	if _, err := w.Write(message); err != nil {
		return err
	}
	return w.Close()
}

// gunzip fills b with what compressed holds; errTooLong when that is more than limit bytes.
func gunzip(b *buffer, compressed []byte, limit int) error {
	r := gzipReaders.Get().(*gzip.Reader)
	defer gzipReaders.Put(r)
	if err := r.Reset(bytes.NewReader(compressed)); err != nil {
		return err
	}
	b.bytes = b.bytes[:0]
	n, err := io.Copy(b, io.LimitReader(r, int64(limit)+1))
	if err == nil && n > int64(limit) {
		return errTooLong
	}
	return err
}
