package readers

import (
	"context"
	"io"
	"sync/atomic"

	"github.com/opencontainers/go-digest"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
)

// Digest counts the bytes that are read through it, and computes their digest.
type Digest struct {
	r        io.Reader
	digester digest.Digester
	n        int64
}

// NewDigest returns a reader of r; by is the algorithm of the digest.
func NewDigest(r io.Reader, by digest.Algorithm) *Digest {
	return &Digest{r: r, digester: by.Digester()}
}

// Sum returns the digest of what has been read so far.
func (d *Digest) Sum() digest.Digest { return d.digester.Digest() }

// Size returns the number of bytes that have been read so far.
func (d *Digest) Size() int64 { return d.n }

func (d *Digest) Read(p []byte) (int, error) {
	n, err := d.r.Read(p)
	d.digester.Hash().Write(p[:n])
	d.n += int64(n)
	return n, err
}

// Budget is a limit for all layers of an image together.
type Budget struct {
	what  string
	limit int64
	used  atomic.Int64
}

// NewBudget makes a budget; errors name what it limits.
func NewBudget(what string, limit int64) *Budget { return &Budget{what: what, limit: limit} }

// Spend uses n units of the budget. After the error, the budget stays used up.
func (b *Budget) Spend(n int64) error {
	if n < 0 || b.used.Add(n) > b.limit {
		return failure.Invalidf("the image has more %s than the limit of %d", b.what, b.limit)
	}
	return nil
}

// Reader returns a reader that fails once the budget is used up.
func (b *Budget) Reader(r io.Reader) io.Reader { return &budgetReader{r, b} }

// Allows returns an error if n more units would exceed the limit. It does not count the units as used, because
// Reader counts the data as it arrives.
func (b *Budget) Allows(n int64) error {
	if n < 0 || n > b.limit-b.used.Load() {
		return failure.Invalidf("the image has more %s than the limit of %d", b.what, b.limit)
	}
	return nil
}

type budgetReader struct {
	r      io.Reader
	budget *Budget
}

func (b *budgetReader) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if over := b.budget.Spend(int64(n)); over != nil {
		return 0, over
	}
	return n, err
}

// Cancel returns a reader that fails with the context's cause once the context ends.
func Cancel(ctx context.Context, r io.Reader) io.Reader { return &cancellable{ctx, r} }

type cancellable struct {
	ctx context.Context
	r   io.Reader
}

func (c *cancellable) Read(p []byte) (int, error) {
	if c.ctx.Err() != nil {
		return 0, context.Cause(c.ctx)
	}
	return c.r.Read(p)
}
