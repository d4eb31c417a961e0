package crilog

import (
	"bytes"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
)

// The CRI's log format has one entry per line of output, or several entries for a long line:
//
//	2016-10-06T00:17:09.669794202Z stdout F The content of a full line
//	2016-10-06T00:17:09.669794202Z stderr P The beginning of a line that continues in the next entry of its stream
//
// (Kubernetes: design proposal "kubelet-cri-logging"). Tags are separated by colons; the first is F or P.

// The streams of a log.
const (
	Stdout = "stdout"
	Stderr = "stderr"
)

// TimeFormat is RFC 3339 with exactly nine digits after the second, so sorting entries as text puts them in the order
// of their times.
const TimeFormat = "2006-01-02T15:04:05.000000000Z07:00"

const (
	tagFull    = "F"
	tagPartial = "P"
)

// MaxPiece is the largest content of an entry, in bytes. A longer line is split into several entries.
const MaxPiece = 16 << 10

// Line is an entry in a log in the CRI's format.
type Line struct {
	Time   time.Time
	Stream string
	// Partial means that the line continues in the next entry of the stream.
	Partial bool
	// Content is the output without its newline.
	Content []byte
}

// Parse parses an entry, with or without its newline. The Content of the result shares memory with the argument. If the
// argument is not an entry, Parse returns errdefs.ErrInvalidArgument.
func Parse(line []byte) (Line, error) {
	stamp, rest, ok1 := bytes.Cut(bytes.TrimSuffix(line, []byte("\n")), []byte(" "))
	stream, rest, ok2 := bytes.Cut(rest, []byte(" "))
	tags, content, _ := bytes.Cut(rest, []byte(" ")) // an entry without content can end after its tag
	tag, _, _ := bytes.Cut(tags, []byte(":"))
	if !ok1 || !ok2 {
		return Line{}, badLine(line, "it has no time, stream and tag")
	}
	at, err := time.Parse(time.RFC3339Nano, string(stamp))
	if err != nil {
		return Line{}, badLine(line, "its time is not in RFC 3339")
	}
	l := Line{Time: at, Content: content}
	switch string(stream) {
	case Stdout:
		l.Stream = Stdout
	case Stderr:
		l.Stream = Stderr
	default:
		return Line{}, badLine(line, "its stream is neither stdout nor stderr")
	}
	switch string(tag) {
	case tagFull:
	case tagPartial:
		l.Partial = true
	default:
		return Line{}, badLine(line, "its tag is neither F nor P")
	}
	return l, nil
}

func badLine(line []byte, why string) error {
	return fmt.Errorf("%.60q is not a line of a CRI log: %s: %w", line, why, errdefs.ErrInvalidArgument)
}

// Append appends the encoded entry and a newline to b.
func (l Line) Append(b []byte) []byte {
	tag := tagFull
	if l.Partial {
		tag = tagPartial
	}
	b = l.Time.AppendFormat(b, TimeFormat)
	b = append(b, ' ')
	b = append(b, l.Stream...)
	b = append(b, ' ')
	b = append(b, tag...)
	b = append(b, ' ')
	b = append(b, l.Content...)
	return append(b, '\n')
}

// Cut returns the first entry of output: a line, or the first MaxPiece bytes of a longer line. The second result is the
// number of bytes consumed; it is 0 if the line is incomplete. The Content of the entry shares memory with the output.
func Cut(output []byte) (l Line, n int) {
	end := bytes.IndexByte(output[:min(MaxPiece+1, len(output))], '\n')
	switch {
	case end >= 0: // a complete line of at most MaxPiece bytes
		return Line{Content: output[:end]}, end + 1
	case len(output) <= MaxPiece:
		return Line{}, 0
	}
	return Line{Content: output[:MaxPiece], Partial: true}, MaxPiece
}
