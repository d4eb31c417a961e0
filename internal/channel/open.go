package channel

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
)

// Flags are the mode of a channel, encoded as in OpenChannel.
type Flags uint8

// The bits of Flags.
const (
	Read      Flags = 1
	Write     Flags = 2
	ReadWrite Flags = 3
	QoS1      Flags = 4
	QoS2      Flags = 8

	wideFD Flags = 0x80 // the channel's number has a second byte, only with the wide header
)

// QoS returns the quality of service: 0, 1 or 2. If both bits are set, QoS returns 2.
func (f Flags) QoS() byte {
	switch {
	case f&QoS2 != 0:
		return 2
	case f&QoS1 != 0:
		return 1
	}
	return 0
}

// CanRead reports whether messages are delivered to the channel.
func (f Flags) CanRead() bool { return f&Read != 0 }

// CanWrite reports whether the channel publishes.
func (f Flags) CanWrite() bool { return f&Write != 0 }

// String returns the mode as users write it, for example "rw:1".
func (f Flags) String() string {
	s := map[Flags]string{Read: "r", Write: "w", ReadWrite: "rw"}[f&ReadWrite]
	if q := f.QoS(); q != 0 {
		s += fmt.Sprintf(":%d", q)
	}
	return s
}

// ParseFlags parses a mode as users write it: "r", "w" or "rw", optionally followed by ":" and the quality of service.
func ParseFlags(s string) (Flags, error) {
	mode, qos, _ := strings.Cut(s, ":")
	f, known := map[string]Flags{"r": Read, "w": Write, "rw": ReadWrite, "wr": ReadWrite}[mode]
	q, level := map[string]Flags{"": 0, "0": 0, "1": QoS1, "2": QoS2}[qos]
	if !known || !level {
		return 0, fmt.Errorf("channel mode %q: want r, w or rw, optionally with :0, :1 or :2: %w", s, errdefs.ErrInvalidArgument)
	}
	return f | q, nil
}

// Open is the payload of OpenChannel: fd:u8 | flags:u8 | topic. For a number above 255, which needs the wide header,
// bit 7 of the flags is set, and the number's upper byte follows the flags.
type Open struct {
	FD    int
	Flags Flags
	Topic string // as given by the module; see Local
}

// ParseOpen parses the payload of OpenChannel. It removes the NULs that C peers send at the end of the topic. It
// returns errdefs.ErrInvalidArgument if the channel has no topic or no mode, or if the topic has a wildcard and the
// mode allows writing.
func ParseOpen(payload []byte) (Open, error) {
	if len(payload) < 2 {
		return Open{}, fmt.Errorf("open a channel with %d bytes: want number, flags and topic: %w", len(payload), errdefs.ErrInvalidArgument)
	}
	o := Open{FD: int(payload[0]), Flags: Flags(payload[1])}
	rest := payload[2:]
	if o.Flags&wideFD != 0 {
		if len(rest) == 0 {
			return Open{}, fmt.Errorf("open a channel: the flags announce a second byte of the number, which is missing: %w",
				errdefs.ErrInvalidArgument)
		}
		o.FD |= int(rest[0]) << 8
		o.Flags &^= wideFD
		rest = rest[1:]
	}
	o.Topic = string(bytes.TrimRight(rest, "\x00"))
	return o, o.Validate()
}

// Validate checks the number, the flags and the topic. The error is errdefs.ErrInvalidArgument.
func (o Open) Validate() error {
	if o.FD < 0 || o.FD >= MaxChannelsWide {
		return fmt.Errorf("channel %d: numbers are 0 to %d: %w", o.FD, MaxChannelsWide-1, errdefs.ErrInvalidArgument)
	}
	if err := validMode(o.Flags, o.Topic); err != nil {
		return fmt.Errorf("channel %d: %w", o.FD, err)
	}
	return nil
}

// Append appends the payload of OpenChannel.
func (o Open) Append(b []byte) []byte {
	if o.FD < MaxChannels {
		b = append(b, byte(o.FD), byte(o.Flags&^wideFD))
	} else {
		b = append(b, byte(o.FD), byte(o.Flags|wideFD), byte(o.FD>>8))
	}
	return append(b, o.Topic...)
}

// ParseClose parses the payload of CloseChannel. The payload is the channel's number: one byte or, with the wide
// header, two bytes in little endian. A NUL at the end, which C peers send, does not change the number.
func ParseClose(payload []byte) (fd int, err error) {
	switch len(payload) {
	case 1:
		return int(payload[0]), nil
	case 2:
		return int(binary.LittleEndian.Uint16(payload)), nil
	}
	return 0, fmt.Errorf("close a channel with %d bytes: want its number: %w", len(payload), errdefs.ErrInvalidArgument)
}

// AppendClose appends the payload of CloseChannel.
func AppendClose(b []byte, fd int) []byte {
	if fd < MaxChannels {
		return append(b, byte(fd))
	}
	return binary.LittleEndian.AppendUint16(b, uint16(fd))
}

// AppendSettled appends the payload of a Settled message.
func AppendSettled(b []byte, n uint64) []byte { return binary.LittleEndian.AppendUint64(b, n) }

// ParseSettled returns the number in the payload of a Settled message, or errdefs.ErrInvalidArgument.
func ParseSettled(payload []byte) (uint64, error) {
	if len(payload) != 8 {
		return 0, fmt.Errorf("number of settled messages: %d bytes, want 8: %w", len(payload), errdefs.ErrInvalidArgument)
	}
	return binary.LittleEndian.Uint64(payload), nil
}
