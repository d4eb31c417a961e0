package vm

import (
	"context"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
)

// TestCallsAreBounded: a guest cannot keep the daemon busy with an answer that is too long, nor with one that never comes.
func TestCallsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newOCIRig(t, &fakeGuest{answer: func(ctx context.Context, r guestapi.Request, _, out io.ReadWriter) error {
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
