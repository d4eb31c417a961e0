package unitpods

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/internal/crilog"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

func TestLogLines(t *testing.T) {
	r := newRig(t)
	p := r.create(2, uuid)
	r.print(uuid, "one", "", "three "+strings.Repeat("x", 3*crilog.MaxPiece))
	r.want(2, wire.ModuleLog, "one")
	r.want(2, wire.ModuleLog, "")
	long := ""
	for len(long) < 6+3*crilog.MaxPiece {
		long += string(r.receive().Payload)
	}
	if long != "three "+strings.Repeat("x", 3*crilog.MaxPiece) {
		t.Errorf("%d bytes of the long line", len(long))
	}
	// Lines left by a worker that was killed are delivered too, before the end.
	path := filepath.Join(p.Config.LogDirectory, logFile)
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	r.must(err)
	_, err = f.WriteString("2026-01-02T03:04:05.0Z stderr F half a li")
	r.must(err)
	r.must(f.Close())
	r.guests.Exit(p.ID, 1)
	r.want(2, wire.ModuleLog, "half a li")
	r.wantExited(2, 1, "exited")
}

// TestLogOverRestarts: each line is delivered once, whatever the manager had taken before the daemon was killed.
func TestLogOverRestarts(t *testing.T) {
	r := newRig(t, func(c *Config) { c.LogBytes = minLogBytes })
	p := r.create(0, uuid)
	next := 0
	const rounds, lines = 8, 100
	for round := range rounds {
		batch := make([]string, lines)
		for i := range batch {
			batch[i] = fmt.Sprintf("line %d %s", round*lines+i, strings.Repeat("x", 20))
		}
		r.print(uuid, batch...)
		for range (round + 1) * lines * 2 / 3 { // some stay in the queue, or the file
			if next == (round+1)*lines {
				break
			}
			r.want(0, wire.ModuleLog, fmt.Sprintf("line %d %s", next, strings.Repeat("x", 20)))
			next++
		}
		r.reopen()
		if ok, err := r.Adopt(t.Context(), 0, r.data(uuid)); !ok || err != nil {
			t.Fatalf("Adopt returned %v, %v, want true without an error", ok, err)
		}
	}
	for ; next < rounds*lines; next++ {
		r.want(0, wire.ModuleLog, fmt.Sprintf("line %d %s", next, strings.Repeat("x", 20)))
	}
	r.eventually("the log is restarted, while the module runs", func() bool {
		r.guests.mu.Lock()
		defer r.guests.mu.Unlock()
		return r.guests.reopened > 0
	})
	r.guests.Exit(p.ID, 0)
	r.wantExited(0, 0, "exited")
}

// TestLogIsBounded: a log that the manager does not take is dropped, and the number of dropped bytes is reported; every
// line is either delivered or counted.
func TestLogIsBounded(t *testing.T) {
	r := newRig(t, func(c *Config) { c.LogBytes = 64 << 10 })
	p := r.create(0, uuid)
	dir := p.Config.LogDirectory
	line := strings.Repeat("x", 1000)
	written := 0
	for ; written < 3000; written++ {
		r.print(uuid, line)
		if written%100 == 0 { // as fast as a worker whose log is looked at once a second
			r.eventually("the log is restarted", func() bool {
				info, err := os.Stat(filepath.Join(dir, logFile))
				return err == nil && info.Size() <= 2*r.config.LogBytes
			})
		}
	}
	r.guests.Exit(p.ID, 0)
	taken, dropped := 0, 0
	for {
		m := r.receive()
		if m.Arg == wire.Exited {
			break
		}
		var n int
		if _, err := fmt.Sscanf(string(m.Payload), "tripod: %d bytes of the log were dropped", &n); err == nil {
			dropped += n
			continue
		}
		taken++
	}
	perLine := len("2026-01-02T03:04:05.000000000Z stdout F \n") + len(line)
	if dropped == 0 || dropped%perLine != 0 || taken+dropped/perLine != written {
		t.Errorf("%d lines taken, %d bytes (%d lines) dropped of %d", taken, dropped, dropped/perLine, written)
	}
}
