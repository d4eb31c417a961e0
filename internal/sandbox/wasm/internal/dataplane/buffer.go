package dataplane

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"connectrpc.com/connect"
	"github.com/klauspost/compress/gzip"
)

// buffer is a byte slice that the pool recycles.
type buffer struct{ bytes []byte }

var buffers = sync.Pool{New: func() any { return &buffer{bytes: make([]byte, 0, 1024)} }}

const (
	// maxPooled is the maximum capacity of a buffer in the pool.
	maxPooled = 5 << 20
	// firstRead bounds how many bytes readFrom allocates before any have arrived. Without this bound, a client could
	// occupy the memory for a large message by announcing the message and never sending it.
	firstRead = 64 << 10
)

func getBuffer() *buffer { return buffers.Get().(*buffer) }

func (b *buffer) free() {
	if b != nil && cap(b.bytes) <= maxPooled {
		buffers.Put(b)
	}
}

// room sets the buffer's length to n and returns its bytes, with undefined content.
func (b *buffer) room(n int) []byte {
	b.bytes = slices.Grow(b.bytes[:0], n)[:n]
	return b.bytes
}

// readFrom fills the buffer with n bytes from r. It returns io.ErrUnexpectedEOF or io.EOF if r ends earlier.
func (b *buffer) readFrom(r io.Reader, n int) error {
	b.bytes = b.bytes[:0]
	for step := firstRead; len(b.bytes) < n; step *= 4 {
		have := len(b.bytes)
		want := min(n-have, step)
		b.bytes = slices.Grow(b.bytes, want)[:have+want]
		if _, err := io.ReadFull(r, b.bytes[have:]); err != nil {
			return err
		}
	}
	return nil
}

// Write implements io.Writer for gzip writers.
func (b *buffer) Write(p []byte) (int, error) {
	b.bytes = append(b.bytes, p...)
	return len(p), nil
}

var (
	gzipWriters = sync.Pool{New: func() any { return gzip.NewWriter(io.Discard) }}
	gzipReaders = sync.Pool{New: func() any { return new(gzip.Reader) }}
	errTooLong  = errors.New("too long")
)

// gzipTo appends the compressed message to b.
func gzipTo(b *buffer, message []byte) error {
	w := gzipWriters.Get().(*gzip.Writer)
	defer gzipWriters.Put(w)
	w.Reset(b)
	if _, err := w.Write(message); err != nil {
		return err
	}
	return w.Close()
}

// grpcGunzip is connect-go's decompressor for the gRPC protocols, where damaged gzip is INTERNAL (grpc/doc/statuscodes.md).
// In Connect, it is INVALID_ARGUMENT, which connect-go makes of all other errors.
type grpcGunzip struct {
	reader  gzip.Reader
	damaged error // of the header; Read returns it, because connect-go replaces errors of Reset
}

func (g *grpcGunzip) Reset(r io.Reader) error {
	g.damaged = g.reader.Reset(r)
	return nil
}

func (g *grpcGunzip) Read(p []byte) (n int, err error) {
	if err = g.damaged; err == nil {
		n, err = g.reader.Read(p)
		if err == nil || errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			return n, err
		}
	}
	return n, connect.NewError(connect.CodeInternal, fmt.Errorf("message: gzip: %w", err))
}

// Close does nothing: a gzip.Reader has nothing to release.
func (g *grpcGunzip) Close() error { return nil }

// gunzip replaces the content of b with the decompressed bytes. It returns errTooLong if there are more than limit
// bytes.
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
