package describe

import (
	"context"
	"crypto/rand"
	"fmt"
	"strings"
	"time"

	"github.com/tetratelabs/wazero/api"
)

// seen records what a guest asks for. Nodes look at the same before they begin requests from a snapshot of the guest.
type seen struct {
	randoms, clocks uint64 // random values, and readings of the time of day
}

// Read implements io.Reader for random values.
func (s *seen) Read(p []byte) (int, error) {
	s.randoms++
	return rand.Read(p)
}

func (s *seen) walltime() (sec int64, nsec int32) {
	s.clocks++
	now := time.Now()
	return now.Unix(), int32(now.Nanosecond())
}

// readings runs one of the guest's functions for snapshots, and returns why nodes will make no snapshot after it, or "".
func (s *seen) readings(ctx context.Context, m api.Module, name, what string) (string, error) {
	results, err := m.ExportedFunction(name).Call(ctx)
	if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	if err != nil {
		first, _, _ := strings.Cut(err.Error(), "\n")
		return fmt.Sprintf("its %s failed: %s", what, first), nil
	}
	if len(results) != 1 {
		return "", malformed("%s has the wrong type", name)
	}
	at := uint32(results[0])
	which, ok := m.Memory().ReadByte(at)
	renewed, ok4 := m.Memory().ReadUint32Le(at + 4)
	switch {
	case !ok || !ok4 || at%4 != 0 || which > 1:
		return "", malformed("the result of %s is not a result at %#x", name, at)
	case which == 1:
		text, err := list(m.Memory(), at+4, 1, maxText)
		return strings.ToValidUTF8(string(text), "?"), err
	case s.randoms+s.clocks > uint64(renewed):
		return "it asks for random values or the time of day before its first request", nil
	}
	return "", nil
}
