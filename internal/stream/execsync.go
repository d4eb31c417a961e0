package stream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// MaxExecSyncOutput limits the output that ExecSync returns, stdout and stderr together, in bytes. The kubelet refuses
// messages of more than 16 MiB; the remaining 64 KiB are for the other fields.
const MaxExecSyncOutput = 16<<20 - 64<<10

var errExecTimeout = errors.New("exec timeout")

// ExecSync runs a program in a container and returns its output and exit code; an exit code other than 0 is not an
// error. Output beyond MaxExecSyncOutput is dropped, and the last line of stderr says how much.
//
// When the timeout expires, the program is killed, and the error is context.DeadlineExceeded, as the kubelet expects. A
// timeout of 0 means no limit. An empty cmd or a negative timeout is an errdefs.ErrInvalidArgument.
func ExecSync(ctx context.Context, rt Runtime, containerID string, cmd []string,
	timeout time.Duration) (*runtimeapi.ExecSyncResponse, error) {
	switch {
	case containerID == "":
		return nil, invalid("exec: container_id is empty")
	case len(cmd) == 0:
		return nil, invalid("exec: cmd is empty: name a program")
	case timeout < 0:
		return nil, invalid("exec: timeout %s is negative: give 0 for none", timeout)
	case timeout > 0:
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, timeout, errExecTimeout)
		defer cancel()
	}
	out := output{room: MaxExecSyncOutput}
	code, err := rt.Exec(ctx, containerID, sandbox.ExecRequest{
		Cmd:    cmd,
		Stdout: outputWriter{&out, &out.stdout},
		Stderr: outputWriter{&out, &out.stderr},
	})
	if errors.Is(context.Cause(ctx), errExecTimeout) {
		return nil, fmt.Errorf("command %q in container %s timed out after %s: %w", cmd, containerID, timeout, context.DeadlineExceeded)
	}
	if err != nil {
		return nil, err
	}
	stdout, stderr := out.result()
	return &runtimeapi.ExecSyncResponse{Stdout: stdout, Stderr: stderr, ExitCode: code}, nil
}

// output collects stdout and stderr within a common limit. After a call to the method result, writes are ignored,
// because a child process may still write to the program's stdio after the program has ended.
type output struct {
	mu             sync.Mutex
	room           int
	dropped        int64
	stdout, stderr bytes.Buffer
	taken          bool
}

type outputWriter struct {
	out *output
	buf *bytes.Buffer
}

func (w outputWriter) Write(p []byte) (int, error) {
	w.out.mu.Lock()
	defer w.out.mu.Unlock()
	if w.out.taken {
		return len(p), nil
	}
	n := min(len(p), w.out.room)
	w.buf.Write(p[:n])
	w.out.room -= n
	w.out.dropped += int64(len(p) - n)
	return len(p), nil
}

func (o *output) result() (stdout, stderr []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.taken = true
	if o.dropped > 0 {
		fmt.Fprintf(&o.stderr, "\n[output cut: %d bytes beyond the limit of %d were dropped]\n", o.dropped, MaxExecSyncOutput)
	}
	return o.stdout.Bytes(), o.stderr.Bytes()
}
