package oci

import (
	"context"
	"encoding/json"
	"io"
	"testing"
	"testing/synctest"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
)

// TestStartWhileGuestRestarts: tripod-guest ends in the start of a container, and the next one is at first not ready. It says
// whether the program was started. A program that was started is not started again.
func TestStartWhileGuestRestarts(t *testing.T) {
	for _, test := range []struct {
		name   string
		says   sandbox.Status
		first  bool
		starts int
		fails  bool
	}{
		{"running", sandbox.Status{State: sandbox.StateRunning}, true, 1, false},
		{"ended", sandbox.Status{State: sandbox.StateExited, ExitCode: 3}, true, 1, false},
		{"ended before", sandbox.Status{State: sandbox.StateExited, ExitCode: 3}, false, 1, true},
		{"not startable", sandbox.Status{State: sandbox.StateExited, Reason: sandbox.ReasonStartError}, true, 1, true},
		{"not started", sandbox.Status{State: sandbox.StateCreated}, true, 2, false},
		{"lost", sandbox.Status{}, true, 1, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var g *fakeGuest
				g = &fakeGuest{answer: func(_ context.Context, r guestapi.Request, _, out io.ReadWriter) error {
					switch {
					case r.Method == guestapi.MethodStart && g.called(guestapi.MethodStart) == 1:
						return agent.ErrRestarted
					case r.Method == guestapi.MethodStart:
						return json.NewEncoder(out).Encode(sandbox.Status{State: sandbox.StateRunning})
					case g.called(guestapi.MethodStatuses) == 1:
						return errdefs.ErrUnavailable
					}
					return json.NewEncoder(out).Encode(map[string]sandbox.Status{"c": test.says})
				}}
				r := newRig(t, g)
				began, err := r.startInGuest(t.Context(), "p", "c", test.first)
				if (err != nil) != test.fails || err == nil && began.ExitCode != test.says.ExitCode {
					t.Errorf("start: got %+v, error %v; want the guest's status, or an error: %v", began, err, test.fails)
				}
				if got := g.called(guestapi.MethodStart); got != test.starts {
					t.Errorf("starts: got %d, want %d", got, test.starts)
				}
			})
		})
	}
}
