package guestapi

import (
	"bytes"
	"fmt"

	"github.com/containerd/errdefs"
)

// Lines is a writer that passes on whole lines, with their line breaks. A guest that sends a longer part of a line than Limit bytes
// gets errdefs.ErrDataLoss.
type Lines struct {
	Limit int
	Line  func([]byte) error

	rest []byte
}

// Write implements io.Writer.
func (l *Lines) Write(p []byte) (int, error) {
	for data := p; len(data) > 0; {
		end := bytes.IndexByte(data, '\n') + 1
		if end == 0 {
			l.rest = append(l.rest, data...)
			break
		}
		line := data[:end]
		if len(l.rest) > 0 {
			line = append(l.rest, line...)
			l.rest = nil
		}
		if err := l.Line(line); err != nil {
			return 0, err
		}
		data = data[end:]
	}
	if len(l.rest) > l.Limit {
		return 0, fmt.Errorf("the guest sent a line of more than %d bytes: %w", l.Limit, errdefs.ErrDataLoss)
	}
	return len(p), nil
}
