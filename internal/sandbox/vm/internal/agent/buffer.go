package agent

import (
	"bytes"
	"fmt"

	"github.com/containerd/errdefs"
)

// Buffer is a buffer for what a guest sends, which takes only so many bytes.
type Buffer struct {
	bytes.Buffer
	// Limit is how many. A write of more fails with errdefs.ErrResourceExhausted.
	Limit int
}

// Write implements io.Writer.
func (b *Buffer) Write(p []byte) (int, error) {
	if b.Len()+len(p) > b.Limit {
		return 0, fmt.Errorf("more than %d bytes: %w", b.Limit, errdefs.ErrResourceExhausted)
	}
	return b.Buffer.Write(p)
}
