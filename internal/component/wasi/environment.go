package wasi

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// Exit is the error of a host function that ends the guest, because the guest called exit of wasi:cli/exit.
type Exit struct{ Code int }

func (e *Exit) Error() string { return fmt.Sprintf("guest exited with code %d", e.Code) }

// exit ends the guest: with code 0 for ok, and with code 1 for an error.
func exit(c *Call) error { return &Exit{Code: c.In.Case(2)} }

var environmentFuncs = map[string]Func{
	"get-environment": func(c *Call) error {
		c.Out = wit.AppendLen(c.Out, len(c.options.Env))
		for _, v := range c.options.Env {
			name, value, _ := strings.Cut(v, "=")
			c.Out = wit.AppendString(wit.AppendString(c.Out, name), value)
		}
		return nil
	},
	"get-arguments": func(c *Call) error {
		c.Out = wit.AppendLen(c.Out, len(c.options.Args))
		for _, a := range c.options.Args {
			c.Out = wit.AppendString(c.Out, a)
		}
		return nil
	},
	"initial-cwd": absent,
}

// noTerminal returns no terminal, because the guest's streams are never terminals.
func noTerminal(c *Call) error { return absent(c) }

func absent(c *Call) error {
	c.Out = wit.AppendOption(c.Out, false)
	return nil
}

// wallClockFuncs return a datetime: seconds since 1970-01-01T00:00:00Z, and nanoseconds.
var wallClockFuncs = map[string]Func{
	"now": func(c *Call) error {
		now := time.Now()
		c.Out = wit.AppendU32(wit.AppendU64(c.Out, uint64(now.Unix())), uint32(now.Nanosecond()))
		return nil
	},
	"resolution": func(c *Call) error {
		c.Out = wit.AppendU32(wit.AppendU64(c.Out, 0), 1)
		return nil
	},
}

// maxRandom limits the random bytes that a guest gets in one call, because the host keeps them until the guest has
// copied them.
const maxRandom = 1 << 20

// ErrRandom ends the call of a guest that asks for more than maxRandom bytes at once.
var ErrRandom = fmt.Errorf("the guest asked for more than %d random bytes at once: %w", maxRandom, errdefs.ErrResourceExhausted)

// randomBytes also implements get-insecure-random-bytes: the interface allows insecure numbers, and does not ask for them.
func randomBytes(c *Call) error {
	n := c.In.U64()
	if n > maxRandom {
		return ErrRandom
	}
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails
	c.Out = wit.AppendBytes(c.Out, b)
	return nil
}

func randomU64(c *Call) error {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	c.Out = wit.AppendU64(c.Out, binary.NativeEndian.Uint64(b[:]))
	return nil
}

func insecureSeed(c *Call) error {
	_ = randomU64(c)
	return randomU64(c)
}
