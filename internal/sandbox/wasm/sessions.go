package wasm

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/internal/unixsocket"
)

// Sessions serves attach sessions in a carrier. It implements sandbox.SessionServer.
type Sessions struct{}

var (
	_ sandbox.SessionPlanner = (*Backend)(nil)
	_ sandbox.SessionServer  = Sessions{}
)

// sessionPlan says which worker runs a container.
type sessionPlan struct {
	ID        string `json:"id"`
	WorkerDir string `json:"workerDir"`
	Stdin     bool   `json:"stdin,omitempty"`
}

// PlanSession implements sandbox.SessionPlanner.
func (b *Backend) PlanSession(_ context.Context, p *sandbox.Pod, c *sandbox.Container, _ sandbox.SessionKind) (json.RawMessage, error) {
	_, l, err := b.ledger.GetRun(p.ID, c.ID)
	if err != nil {
		return nil, err
	}
	return json.Marshal(sessionPlan{ID: c.ID, WorkerDir: l.worker.dir, Stdin: c.Config.GetStdin()})
}

// Exec implements sandbox.SessionServer.
func (Sessions) Exec(context.Context, []byte, sandbox.ExecRequest) (int32, error) {
	return 0, fmt.Errorf("pods of runtime handler \"wasm\" have no exec: %w", errdefs.ErrNotImplemented)
}

// Attach implements sandbox.SessionServer. The session has its own connection to the worker.
func (Sessions) Attach(ctx context.Context, plan []byte, req sandbox.AttachRequest) error {
	var p sessionPlan
	if err := json.Unmarshal(plan, &p); err != nil {
		return err
	}
	dialing, cancel := context.WithTimeout(ctx, helloTime)
	defer cancel()
	conn, err := unixsocket.Dial(dialing, filepath.Join(p.WorkerDir, controlSocket))
	if err != nil {
		return fmt.Errorf("attach: the worker does not answer: %w: %w", err, errdefs.ErrUnavailable)
	}
	worker, err := workerapi.NewSessionClient(dialing, conn)
	if err != nil {
		return fmt.Errorf("attach: %w", err)
	}
	defer worker.Close()
	return attach(ctx, worker, p.ID, p.Stdin, req)
}
