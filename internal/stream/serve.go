package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/wsstream"
	utilexec "k8s.io/utils/exec"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// routes knows one path per kind of session; clients use GET (WebSocket) and POST (SPDY).
func (s *Server) routes() http.Handler {
	mux := http.NewServeMux()
	for _, method := range []string{http.MethodGet, http.MethodPost} {
		mux.HandleFunc(method+" /"+kindExec+"/{token}", s.handle(kindExec))
		mux.HandleFunc(method+" /"+kindAttach+"/{token}", s.handle(kindAttach))
		mux.HandleFunc(method+" /"+kindPortForward+"/{token}", s.handle(kindPortForward))
	}
	return guard.Handler(s.log, "streaming server", mux)
}

// handle serves the sessions of a kind, from the token to the end.
func (s *Server) handle(kind string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		req, ok := s.tokens.redeem(kind, r.PathValue("token"))
		if !ok {
			http.Error(w, fmt.Sprintf("no such %s session: its URL works once, within %s", kind, s.config.TokenTTL), http.StatusNotFound)
			return
		}
		if !s.enter() {
			http.Error(w, errServerClosed.Error(), http.StatusServiceUnavailable)
			return
		}
		start := time.Now()
		switch req := req.(type) {
		case *runtimeapi.ExecRequest:
			s.serveStdio(w, r, stdioSession{req: req, run: execution(s.config.Runtime, req)})
		case *runtimeapi.AttachRequest:
			s.serveStdio(w, r, stdioSession{req: req, run: attachment(s.config.Runtime, req), attach: true})
		case *runtimeapi.PortForwardRequest:
			s.servePortForward(w, r, req)
		}
		s.log.Debug("session ended", "kind", kind, "after", time.Since(start))
	}
}

// stdio is what a session has for the three streams and the terminal; what was not asked for is nil.
type stdio struct {
	in       io.Reader
	out, err io.Writer
	resize   <-chan sandbox.TermSize
}

// execution runs a program in a container.
func execution(rt Runtime, req *runtimeapi.ExecRequest) func(context.Context, stdio) error {
	return func(ctx context.Context, std stdio) error {
		code, err := rt.Exec(ctx, req.GetContainerId(), sandbox.ExecRequest{
			Cmd: req.GetCmd(), TTY: req.GetTty(), Stdin: std.in, Stdout: std.out, Stderr: std.err, Resize: std.resize,
		})
		if err == nil && code != 0 {
			// By this type the protocol library knows an exit code from a failure.
			err = utilexec.CodeExitError{Err: fmt.Errorf("exit code %d", code), Code: int(code)}
		}
		return err
	}
}

// attachment joins the stdio of a container.
func attachment(rt Runtime, req *runtimeapi.AttachRequest) func(context.Context, stdio) error {
	return func(ctx context.Context, std stdio) error {
		return rt.Attach(ctx, req.GetContainerId(), sandbox.AttachRequest{
			TTY: req.GetTty(), Stdin: std.in, Stdout: std.out, Stderr: std.err, Resize: std.resize,
		})
	}
}

// serveStdio serves an exec or attach session in whichever protocol the client speaks.
func (s *Server) serveStdio(w http.ResponseWriter, r *http.Request, session stdioSession) {
	opts, streams := session.options()
	ss, r := s.begin(w, r, streams)
	defer ss.end()
	session.start = ss.start
	idle, creation, protocols := s.config.IdleTimeout, s.config.CreationTimeout, remotecommand.SupportedStreamingProtocols
	switch {
	case wsstream.IsWebSocketRequestWithStreamCloseProtocol(r):
		s.serveWebSocketV5(ss, r, opts, session)
	case session.attach:
		remotecommand.ServeAttach(ss, r, session, "", "", "", opts, idle, creation, protocols)
	default:
		remotecommand.ServeExec(ss, r, session, "", "", "", nil, opts, idle, creation, protocols)
	}
}

// stdioSession is an exec or attach session as the protocol library wants it: it is called once the client's streams are there.
type stdioSession struct {
	req    stdioRequest
	run    func(context.Context, stdio) error
	attach bool
	start  func() error
}

var (
	_ remotecommand.Executor = stdioSession{}
	_ remotecommand.Attacher = stdioSession{}
)

func (s stdioSession) ExecInContainer(ctx context.Context, _, _, _ string, _ []string, in io.Reader, out, err io.WriteCloser, _ bool, resize <-chan remotecommand.TerminalSize, _ time.Duration) error {
	return s.serve(ctx, in, out, err, resize)
}

func (s stdioSession) AttachContainer(ctx context.Context, _, _, _ string, in io.Reader, out, err io.WriteCloser, _ bool, resize <-chan remotecommand.TerminalSize) error {
	return s.serve(ctx, in, out, err, resize)
}

// options are what the protocol library must know, with the number of SPDY streams that the client is to open.
func (s stdioSession) options() (*remotecommand.Options, int) {
	opts := &remotecommand.Options{Stdin: s.req.GetStdin(), Stdout: s.req.GetStdout(), Stderr: s.req.GetStderr(), TTY: s.req.GetTty()}
	streams := 1 // the error stream; with a terminal there is one for its size
	for _, more := range []bool{opts.Stdin, opts.Stdout, opts.Stderr, opts.TTY} {
		if more {
			streams++
		}
	}
	return opts, streams
}

// serve runs the session with those of the protocol's streams that the request asked for.
func (s stdioSession) serve(ctx context.Context, in io.Reader, out, err io.WriteCloser, resize <-chan remotecommand.TerminalSize) error {
	if err := s.start(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var std stdio
	if s.req.GetStdin() {
		std.in = in
	}
	if s.req.GetStdout() && out != nil {
		std.out = chunked{ctx, out}
		defer out.Close() // tells the client that no more comes
	}
	if s.req.GetStderr() && err != nil {
		std.err = chunked{ctx, err}
		defer err.Close()
	}
	if resize != nil {
		sizes := termSizes(ctx, resize)
		if s.req.GetTty() {
			std.resize = sizes
		}
	}
	return s.run(ctx, std)
}

// chunked writes in portions that any client takes as one frame (an SPDY frame cannot hold more than 16 MiB), until ctx ends.
type chunked struct {
	ctx context.Context
	w   io.Writer
}

func (c chunked) Write(p []byte) (int, error) {
	const size = 32 << 10
	written := 0
	for chunk := range slices.Chunk(p, size) {
		if c.ctx.Err() != nil {
			return written, context.Cause(c.ctx)
		}
		n, err := c.w.Write(chunk)
		written += n
		if err != nil {
			return written, err
		}
	}
	return written, nil
}

// termSizes passes sizes on in the contract's type until ctx ends or there are no more. Of sizes that nobody takes the last
// one stands: over WebSocket, a size that waits would hold up the client's stdin.
func termSizes(ctx context.Context, from <-chan remotecommand.TerminalSize) <-chan sandbox.TermSize {
	to := make(chan sandbox.TermSize)
	go func() {
		defer close(to)
		var last sandbox.TermSize
		var out chan<- sandbox.TermSize // nil while there is nothing to pass on
		for from != nil || out != nil {
			select {
			case size, ok := <-from:
				if !ok {
					from = nil
					continue
				}
				last, out = sandbox.TermSize{Width: size.Width, Height: size.Height}, to
			case out <- last:
				out = nil
			case <-ctx.Done():
				return
			}
		}
	}()
	return to
}

// servePortForward serves a session that forwards any number of connections.
func (s *Server) servePortForward(w http.ResponseWriter, r *http.Request, req *runtimeapi.PortForwardRequest) {
	ss, r := s.begin(w, r, 0)
	defer ss.end()
	opts, err := portforward.BuildV4Options(req.GetPort())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if ss.start() != nil {
		return
	}
	portforward.ServePortForward(ss, r, &forwarder{s.config.Runtime, ss, req}, req.GetPodSandboxId(), "", opts,
		s.config.IdleTimeout, s.config.CreationTimeout, portforward.SupportedProtocols)
}

// forwarder forwards the connections of one session. The protocol library calls it with a context that never ends;
// the session's takes its place. It also calls it when the client may not have been told yet that its stream is there.
type forwarder struct {
	runtime Runtime
	session *session
	req     *runtimeapi.PortForwardRequest
}

func (f *forwarder) PortForward(_ context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
	if spdy, ok := stream.(httpstream.Stream); ok {
		f.session.spdy.answered(f.session.ctx, spdy.Identifier())
	}
	if allowed := f.req.GetPort(); !validPort(port) || len(allowed) > 0 && !slices.Contains(allowed, port) {
		return invalid("port %d was not asked for: the session is for %v", port, allowed)
	}
	ctx := f.session.ctx
	err := f.runtime.PortForward(ctx, f.req.GetPodSandboxId(), port, stream)
	if ctx.Err() != nil {
		abort(stream)
		return errors.Join(err, context.Cause(ctx))
	}
	return err
}
