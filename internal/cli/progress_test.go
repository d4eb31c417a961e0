package cli

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/vbauerster/mpb/v8"
)

func TestProgressInLines(t *testing.T) {
	var out bytes.Buffer
	p := (&App{Stderr: &out}).newProgress("pulling x")
	p.set(1000, 0)
	if out.Len() > 0 {
		t.Errorf("at once: got %q, want no line", out.String())
	}
	p.lineAt = time.Now().Add(-progressInterval)
	p.started = time.Now().Add(-1000 * time.Second)
	p.set(2_000_000, 5_000_000)
	p.set(3_000_000, 5_000_000)
	p.end(nil)
	if want := "pulling x: 2MB of 5MB, 2kB/s\n"; out.String() != want {
		t.Errorf("after a while: got %q, want %q", out.String(), want)
	}
}

func TestProgressBar(t *testing.T) {
	for name, err := range map[string]error{"complete": nil, "failed": errors.New("no")} {
		var out bytes.Buffer
		p := &progress{what: "pulling x", started: time.Now()}
		p.showBar(mpb.WithOutput(&out), mpb.WithAutoRefresh())
		p.set(1000, 0)
		p.set(5_000_000, 5_000_000)
		p.end(err)
		const erase = "\x1b[J"
		last := out.String()[strings.LastIndex(out.String(), erase)+1:]
		shown := strings.Contains(last, "pulling x [====") && strings.Contains(last, "5MB of 5MB")
		if shown != (err == nil) {
			t.Errorf("%s: got %q, want a full bar at the end only if the transfer succeeded", name, out.String())
		}
	}
}
