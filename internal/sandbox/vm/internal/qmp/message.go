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

// MaxLine limits the length of a line from QEMU in bytes. The longest line, the answer to query-qmp-schema, is 200 KiB
// long.
const MaxLine = 1 << 20

// Version is QEMU's version, from the greeting.
type Version struct {
	Major int `json:"major"`
	Minor int `json:"minor"`
	Micro int `json:"micro"`
}

func (v Version) String() string { return fmt.Sprintf("%d.%d.%d", v.Major, v.Minor, v.Micro) }

// Event is an asynchronous event.
type Event struct {
	// Name is QEMU's name for the event, such as SHUTDOWN.
	Name string
	// Data is the event's data, a JSON object or nil.
	Data json.RawMessage
	// Time is the time of the event according to QEMU's clock; zero if unknown.
	Time time.Time
}

// Error is QEMU's report of a failed command. It unwraps to errdefs.ErrNotFound for an unknown device or command,
// otherwise to errdefs.ErrFailedPrecondition.
type Error struct {
	Class string `json:"class"`
	Desc  string `json:"desc"`
}

func (e *Error) Error() string { return e.Desc }

// Unwrap returns the errdefs class.
func (e *Error) Unwrap() error {
	if e.Class == "CommandNotFound" || e.Class == "DeviceNotFound" {
		return errdefs.ErrNotFound
	}
	return errdefs.ErrFailedPrecondition
}

// message is a line from QEMU, of any kind.
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

// time returns the time of an event, or the zero time if QEMU's clock failed (seconds are -1).
func (m *message) time() time.Time {
	if m.Timestamp.Seconds <= 0 {
		return time.Time{}
	}
	return time.Unix(m.Timestamp.Seconds, m.Timestamp.Microseconds*1000)
}

// readMessage reads one message. Every error ends the connection. The errors include io.EOF between two lines, and
// errdefs.ErrDataLoss for a line that is not a message.
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
			return nil, fmt.Errorf("QEMU's monitor sent an invalid message (%.80q): %w (%w)", line, err, errdefs.ErrDataLoss)
		}
		return &m, nil
	}
}

// readLine reads a line of at most MaxLine bytes and returns it without "\r\n" or "\n".
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
