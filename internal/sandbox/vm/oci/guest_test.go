package oci

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
)

// TestCallsAreBounded: a guest cannot keep the daemon busy with an answer that is too long, nor with one that never comes.
func TestCallsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, &fakeGuest{answer: func(ctx context.Context, r guestapi.Request, _, out io.ReadWriter) error {
			for r.Method == guestapi.MethodStats && ctx.Err() == nil {
				_, _ = out.Write([]byte(strings.Repeat("x", 32<<10)))
				time.Sleep(time.Millisecond) // pacing: the guest sends as long as the call lasts
			}
			<-ctx.Done()
			return ctx.Err()
		}})
		began := time.Now()
		err := r.call(t.Context(), "p", guestapi.Request{Method: guestapi.MethodStats}, nil, nil)
		if took := time.Since(began); !errdefs.IsResourceExhausted(err) || took > time.Second {
			t.Errorf("call with an endless answer: got error %v after %s, want that it is too long", err, took)
		}
		began = time.Now()
		err = r.settle(t.Context(), r.pod)
		if took := time.Since(began); err == nil || took > guestTime {
			t.Errorf("settle with a silent guest: got error %v after %s, want one after %s", err, took, guestTime)
		}
	})
}

// TestSettleStopsStrays: a container that runs in the guest although its start has failed, because the guest did not answer in
// time, is stopped. Others are not.
func TestSettleStopsStrays(t *testing.T) {
	for name, c := range map[string]struct {
		change func(r *rig)
		stops  int
	}{
		"failed":      {func(r *rig) { r.handle.End(r.life, func(s *state) { s.FailStart(errdefs.ErrUnavailable) }) }, 1},
		"running":     {func(*rig) {}, 0},
		"start again": {func(r *rig) { r.handle.End(r.life, func(s *state) { s.Phase = ledger.Created }) }, 0},
	} {
		guest := &fakeGuest{answer: func(_ context.Context, r guestapi.Request, _, out io.ReadWriter) error {
			if r.Method != guestapi.MethodStatuses {
				return nil
			}
			return json.NewEncoder(out).Encode(map[string]sandbox.Status{"c": {State: sandbox.StateRunning}})
		}}
		r := newRig(t, guest)
		c.change(r)
		if err := r.settle(t.Context(), r.pod); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if stops := guest.called(guestapi.MethodStop); stops != c.stops {
			t.Errorf("%s: the guest was asked to stop %d containers, want %d", name, stops, c.stops)
		}
	}
}

// TestGuestFiles: the error says which of the guest's files is missing.
func TestGuestFiles(t *testing.T) {
	g := guestFiles{t.TempDir()}
	for _, name := range []string{"vmlinux", "initrd", "root.erofs"} {
		path := filepath.Join(g.dir, name)
		if err := g.check(); !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), path+":") {
			t.Errorf("check without %s: got %v", name, err)
		}
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := g.check(); err != nil {
		t.Errorf("check with all files: got %v", err)
	}
}
