package guestnode

import (
	"context"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/guestagent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
)

// sizes returns the sizes of the client's terminal.
func sizes(call guestagent.Call) <-chan sandbox.TermSize {
	latest := make(chan sandbox.TermSize, 1)
	call.OnResize(func(columns, rows uint16) {
		for {
			select {
			case latest <- sandbox.TermSize{Width: columns, Height: rows}:
				return
			default:
			}
			select {
			case <-latest: // replace a size that nobody has read
			default:
			}
		}
	})
	return latest
}

func (n *Node) exec(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, r guestapi.Request, call guestagent.Call) (int32, error) {
	return n.backend.Exec(ctx, p, c, stdio(r, call))
}

func (n *Node) attach(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, r guestapi.Request, call guestagent.Call) error {
	req := stdio(r, call)
	return n.backend.Attach(ctx, p, c,
		sandbox.AttachRequest{Stdin: req.Stdin, Stdout: req.Stdout, Stderr: req.Stderr, TTY: req.TTY, Resize: req.Resize})
}

// stdio returns the request with those streams of the call that the client wants.
func stdio(r guestapi.Request, call guestagent.Call) sandbox.ExecRequest {
	req := sandbox.ExecRequest{Cmd: r.Cmd, TTY: r.TTY}
	if r.Stdin {
		req.Stdin = call.In
	}
	if r.Stdout {
		req.Stdout = call.Out
	}
	if r.Stderr {
		req.Stderr = call.Err
	}
	if r.TTY {
		req.Resize = sizes(call)
	}
	return req
}
