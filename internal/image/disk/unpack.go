package disk

import (
	"context"
	"errors"
	"io"
	"syscall"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/image/internal/readers"
)

// plainHead returns the first 512 bytes of a file's decompressed content, or the whole content if that is shorter.
func plainHead(compression string, packed io.Reader) ([]byte, error) {
	plain, err := readers.Decompressor(compression)(packed)
	if err != nil {
		return nil, failure.Invalidf("%s: %v", compression, err)
	}
	defer plain.Close()
	head := make([]byte, 512)
	n, err := io.ReadFull(plain, head)
	if err != nil && err != io.EOF && !errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, failure.Invalidf("%s: %v", compression, err)
	}
	return head[:n], nil
}

// Unpack writes the decompressed content of the layer's blob to w and returns its size, which has a limit. It checks the
// digest even after an error, because a damaged blob must be fetched again: the error is then a failure.CorruptError.
func (d *Layer) Unpack(ctx context.Context, blob io.Reader, w io.Writer, limit int64) (int64, error) {
	packed := readers.NewDigest(readers.Cancel(ctx, blob), d.Digest.Algorithm())
	size, err := copyPlain(d.Compression, packed, w, limit)
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	if _, readErr := io.Copy(io.Discard, packed); readErr != nil {
		return 0, errors.Join(err, readErr)
	}
	if packed.Sum() != d.Digest {
		return 0, &failure.CorruptError{Digest: d.Digest}
	}
	return size, err
}

func copyPlain(compression string, packed io.Reader, w io.Writer, limit int64) (int64, error) {
	plain, err := readers.Decompressor(compression)(packed)
	if err != nil {
		return 0, failure.Invalidf("%s: %v", compression, err)
	}
	defer plain.Close()
	size, err := io.Copy(w, readers.NewBudget("bytes unpacked", limit).Reader(plain))
	if _, ok := errors.AsType[syscall.Errno](err); err != nil && !ok && !failure.HasClass(err) {
		err = failure.Invalidf("%s: %v", compression, err)
	}
	return size, err
}
