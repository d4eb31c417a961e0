package image

import (
	"bufio"
	"io"

	"github.com/opencontainers/go-digest"
)

// digestReader counts the bytes that are read through it, and computes their digest.
type digestReader struct {
	r        io.Reader
	digester digest.Digester
	n        int64
}

func (d *digestReader) Read(p []byte) (int, error) {
	n, err := d.r.Read(p)
	d.digester.Hash().Write(p[:n])
	d.n += int64(n)
	return n, err
}

// touchReader reports progress to a pull's watch.
type touchReader struct {
	r       io.Reader
	tracker *tracker
}

func (t *touchReader) Read(p []byte) (int, error) {
	n, err := t.r.Read(p)
	if n > 0 {
		t.tracker.touch()
	}
	return n, err
}

// budgetReader fails once the budget is used up.
type budgetReader struct {
	r      io.Reader
	budget *budget
}

func (b *budgetReader) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if over := b.budget.spend(int64(n)); over != nil {
		return 0, over
	}
	return n, err
}

// sniff detects a stream's compression by its first bytes.
func sniff(r io.Reader) (io.Reader, string) {
	b := bufio.NewReaderSize(r, 64<<10)
	// Four bytes identify gzip and zstd, but not xz, which layers must not use. Ignore an error here, because the next
	// read returns it again.
	head, _ := b.Peek(4)
	return b, compressionByContent(head)
}
