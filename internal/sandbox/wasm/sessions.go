package wasm

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workers"
)

// Sessions serves attach sessions in a carrier. It implements sandbox.SessionServer.
type Sessions struct{}

var (
	_ sandbox.SessionPlanner = (*Backend)(nil)
	_ sandbox.SessionServer  = Sessions{}
	_ sandbox.Execer         = (*Backend)(nil)
)

// sessionPlan says which worker runs a container.
type sessionPlan struct {
	ID        string `json:"id"`
	WorkerDir string `json:"workerDir"`
	Stdin     bool   `json:"stdin,omitempty"`
	Foreign   bool   `json:"foreign,omitempty"`
}

// PlanSession implements sandbox.SessionPlanner.
func (b *Backend) PlanSession(_ context.Context, p *sandbox.Pod, c *sandbox.Container, _ sandbox.SessionKind) (json.RawMessage, error) {
	_, l, err := b.ledger.GetRun(p.ID, c.ID)
	if err != nil {
		return nil, err
	}
	return json.Marshal(sessionPlan{ID: c.ID, WorkerDir: l.worker.Dir, Stdin: c.Config.GetStdin(), Foreign: sandbox.IsForeign(p, c)})
}

// Exec implements sandbox.SessionServer. It returns errdefs.ErrNotImplemented.
func (Sessions) Exec(_ context.Context, plan []byte, _ sandbox.ExecRequest) (int32, error) {
	var p sessionPlan
	if err := json.Unmarshal(plan, &p); err != nil {
		return 0, err
	}
	return 0, noExec(p.Foreign)
}

// Exec implements sandbox.Execer. It returns errdefs.ErrNotImplemented.
func (b *Backend) Exec(_ context.Context, p *sandbox.Pod, c *sandbox.Container, _ sandbox.ExecRequest) (int32, error) {
	return 0, noExec(sandbox.IsForeign(p, c))
}

// noExec returns the error of a program that is to run in a component. It says what can be done instead.
func noExec(foreign bool) error {
	instead := "see its output with logs or attach, reach its ports with port-forward, and inspect it with `tripod inspect`"
	if foreign {
		instead += "; `kubectl debug` adds a container with a shell to this pod"
	}
	return fmt.Errorf("components have no exec, because they have no shell and no other programs: %s: %w", instead, errdefs.ErrNotImplemented)
}

// Attach implements sandbox.SessionServer. The session has its own connection to the worker.
func (Sessions) Attach(ctx context.Context, plan []byte, req sandbox.AttachRequest) error {
	var p sessionPlan
	if err := json.Unmarshal(plan, &p); err != nil {
		return err
	}
	worker, err := workers.Session(ctx, p.WorkerDir)
	if err != nil {
		return fmt.Errorf("attach: %w", err)
	}
	defer worker.Close()
	return attach(ctx, worker, p.ID, p.Stdin, req)
}
