package qmp

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/containerd/errdefs"
)

// MaxLine is the longest line that is accepted of QEMU, in bytes. The longest of a healthy one, the answer to
// query-qmp-schema, has about 200 KiB.
const MaxLine = 1 << 20

// Version is QEMU's own, from the greeting.
type Version struct {
	Major int `json:"major"`
	Minor int `json:"minor"`
	Micro int `json:"micro"`
}

func (v Version) String() string { return fmt.Sprintf("%d.%d.%d", v.Major, v.Minor, v.Micro) }

// Event is something that happened without having been asked for.
type Event struct {
	// Name is QEMU's, such as SHUTDOWN.
	Name string
	// Data is what belongs to it, a JSON object or nil.
	Data json.RawMessage
	// Time is when it happened, by QEMU's clock.
	Time time.Time
}

// Error is QEMU's answer that a command failed. It is an errdefs.ErrNotFound for a device or command that is not there,
// else an errdefs.ErrFailedPrecondition.
type Error struct {
	Class string `json:"class"`
	Desc  string `json:"desc"`
}

func (e *Error) Error() string { return e.Desc }

// Unwrap implements errdefs' classes.
func (e *Error) Unwrap() error {
	if e.Class == "CommandNotFound" || e.Class == "DeviceNotFound" {
		return errdefs.ErrNotFound
	}
	return errdefs.ErrFailedPrecondition
}

// message is any line that QEMU sends.
type message struct {
	Greeting *struct {
		Version struct {
			QEMU Version `json:"qemu"`
		} `json:"version"`
	} `json:"QMP"`
	Return    json.RawMessage `json:"return"`
	Error     *Error          `json:"error"`
	ID        *uint64         `json:"id"`
	Event     string          `json:"event"`
	Data      json.RawMessage `json:"data"`
	Timestamp struct {
		Seconds      int64 `json:"seconds"`
		Microseconds int64 `json:"microseconds"`
	} `json:"timestamp"`
}

// at is the time of an event; seconds are -1 where QEMU's clock failed.
func (m *message) at() time.Time {
	if m.Timestamp.Seconds <= 0 {
		return time.Time{}
	}
	return time.Unix(m.Timestamp.Seconds, m.Timestamp.Microseconds*1000)
}

// readMessage reads one line. Its errors end the connection: io.EOF between two lines, errdefs.ErrDataLoss for anything
// that is no message.
func readMessage(r *bufio.Reader) (*message, error) {
	for {
		line, err := readLine(r)
		if err != nil {
			return nil, err
		}
		if len(line) == 0 {
			continue
		}
		var m message
		if err := json.Unmarshal(line, &m); err != nil {
			return nil, fmt.Errorf("QEMU's monitor sent what is no message (%.80q): %w (%w)", line, err, errdefs.ErrDataLoss)
		}
		return &m, nil
	}
}

// readLine reads to the next line feed, MaxLine bytes at most, and gives what is before "\r\n" or "\n".
func readLine(r *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		if len(line)+len(part) > MaxLine {
			return nil, fmt.Errorf("QEMU's monitor sent a line of more than %d bytes: %w", MaxLine, errdefs.ErrDataLoss)
		}
		line = append(line, part...)
		switch {
		case err == nil:
			line = line[:len(line)-1]
			if n := len(line); n > 0 && line[n-1] == '\r' {
				line = line[:n-1]
			}
			return line, nil
		case errors.Is(err, bufio.ErrBufferFull):
		case errors.Is(err, io.EOF) && len(line) > 0:
			return nil, io.ErrUnexpectedEOF
		default:
			return nil, err
		}
	}
}
