package describe

import (
	"context"
	"crypto/rand"
	"fmt"
	"strings"
	"time"

	"github.com/tetratelabs/wazero/api"

	"github.com/tripod-run/tripod/internal/component/protowit"
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

// prepare runs the guest's prepare function, and returns why nodes will make no snapshot of the guest, or "".
func (s *seen) prepare(ctx context.Context, m api.Module) (string, error) {
	name := protowit.SnapshotInterface + "#" + protowit.Prepare
	f := m.ExportedFunction(name)
	if f == nil {
		return fmt.Sprintf("it does not export %s; for a server in Go, use a newer version of the SDK", name), nil
	}
	results, err := f.Call(ctx)
	if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	if err != nil {
		first, _, _ := strings.Cut(err.Error(), "\n")
		return "its initialization failed: " + first, nil
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
