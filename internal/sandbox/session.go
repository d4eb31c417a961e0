package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
)

// Session describes where exec, attach and port-forward sessions lead. It is all that a process other than the daemon
// needs to serve them, so that they outlive the daemon. It is written to disk for at most a minute.
type Session struct {
	// Handler is the key of the backend, which selects the SessionServer.
	Handler string `json:"handler"`
	// Pod and Container are IDs. Container is empty for port-forward.
	Pod       string `json:"pod"`
	Container string `json:"container,omitempty"`
	// Netns is the path of the pod's network namespace; "" means the host's.
	Netns string `json:"netns,omitempty"`
	// DetachAtEOF means that an attach session ends with its client's input; see AttachUntilEOF.
	DetachAtEOF bool `json:"detachAtEOF,omitempty"`
	// Plan is from the backend's SessionPlanner. It is nil if the backend is not asked: for port-forward into a network
	// namespace.
	Plan json.RawMessage `json:"plan,omitempty"`
}

// SessionKind is what a session does.
type SessionKind string

const (
	SessionExec        SessionKind = "exec"
	SessionAttach      SessionKind = "attach"
	SessionPortForward SessionKind = "portforward"
)

// SessionPlanner is for backends whose sessions a SessionServer in another process can serve. PlanSession returns what
// the SessionServer of the same backend needs for a running container; c is nil if a port-forward goes to a pod without
// a running container. Errors: ErrNotImplemented if only the daemon can serve this container, for example because an
// earlier release started it.
type SessionPlanner interface {
	PlanSession(ctx context.Context, p *Pod, c *Container, kind SessionKind) (json.RawMessage, error)
}

// SessionReaper is for backends whose sessions leave something behind when the process that serves them is killed.
// ReapSessions ends and removes that, and nothing that belongs to a live process.
type SessionReaper interface {
	ReapSessions(ctx context.Context) error
}

// SessionServer serves sessions from plans, without a Backend. The methods are those of Execer and Attacher.
type SessionServer interface {
	Exec(ctx context.Context, plan []byte, req ExecRequest) (exitCode int32, err error)
	Attach(ctx context.Context, plan []byte, req AttachRequest) error
}

// SessionDialer is for SessionServers of backends that are Dialers. Dial is that of Dialer.
type SessionDialer interface {
	Dial(ctx context.Context, plan []byte, network, address string) (net.Conn, error)
}

// errDetached ends an attach session whose client has closed its input.
var errDetached = errors.New("the client has closed its input")

// AttachUntilEOF calls attach, and ends it without an error when the client closes its input.
func AttachUntilEOF(ctx context.Context, req AttachRequest, attach func(context.Context, AttachRequest) error) error {
	attached, detach := context.WithCancelCause(ctx)
	defer detach(nil)
	if req.Stdin != nil {
		req.Stdin = endReader{req.Stdin, func() { detach(errDetached) }}
	}
	err := attach(attached, req)
	if ctx.Err() == nil && errors.Is(context.Cause(attached), errDetached) {
		return nil
	}
	return err
}

// endReader calls the function end when the input has ended. By then the backend has forwarded all of the input,
// because every backend forwards the data from one read before it begins the next read.
type endReader struct {
	io.Reader
	end func()
}

func (r endReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if n == 0 && err != nil {
		r.end()
	}
	if n > 0 {
		return n, nil // the next Read returns the error
	}
	return n, err
}
