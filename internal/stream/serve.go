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

// routes returns the handler for all paths. Each kind of session has one path, with GET for WebSocket and POST for
// SPDY.
func (s *Server) routes() http.Handler {
	mux := http.NewServeMux()
	for _, kind := range []string{kindExec, kindAttach, kindPortForward} {
		mux.HandleFunc("GET /"+kind+"/{token}", s.handle(kind))
		mux.HandleFunc("POST /"+kind+"/{token}", s.handle(kind))
	}
	return guard.Handler(s.log, "streaming server", mux)
}

// handle returns a handler that redeems a token and serves its session.
func (s *Server) handle(kind string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !s.enter() { // before the token is redeemed: it stays valid for another carrier
			http.Error(w, errServerClosed.Error(), http.StatusServiceUnavailable)
			return
		}
		defer s.open.Add(-1)
		req, rt, ok := s.redeem(kind, r.PathValue("token"))
		if !ok {
			s.sessions.Done()
			http.Error(w, fmt.Sprintf("no such %s session: its URL works once, within %s", kind, s.config.TokenTTL), http.StatusNotFound)
			return
		}
		start := time.Now()
		switch req := req.(type) {
		case *runtimeapi.ExecRequest:
			s.serveStdio(w, r, stdioSession{req: req, run: execution(rt, req)})
		case *runtimeapi.AttachRequest:
			s.serveStdio(w, r, stdioSession{req: req, run: attachment(rt, req), attach: true})
		case *runtimeapi.PortForwardRequest:
			s.servePortForward(w, r, rt, req)
		}
		s.log.Debug("session ended", "kind", kind, "after", time.Since(start))
	}
}

// stdio holds a session's streams and the sizes of its terminal. What the client did not request is nil.
type stdio struct {
	in       io.Reader
	out, err io.Writer
	resize   <-chan sandbox.TermSize
}

// execution returns a function that runs the requested program in its container.
func execution(rt Runtime, req *runtimeapi.ExecRequest) func(context.Context, stdio) error {
	return func(ctx context.Context, std stdio) error {
		code, err := rt.Exec(ctx, req.GetContainerId(), sandbox.ExecRequest{
			Cmd: req.GetCmd(), TTY: req.GetTty(), Stdin: std.in, Stdout: std.out, Stderr: std.err, Resize: std.resize,
		})
		if err == nil && code != 0 {
			// The protocol library recognises an exit code by this type; any other error is a failure.
			err = utilexec.CodeExitError{Err: fmt.Errorf("exit code %d", code), Code: int(code)}
		}
		return err
	}
}

// attachment returns a function that attaches to the stdio of the requested container.
func attachment(rt Runtime, req *runtimeapi.AttachRequest) func(context.Context, stdio) error {
	return func(ctx context.Context, std stdio) error {
		return rt.Attach(ctx, req.GetContainerId(), sandbox.AttachRequest{
			TTY: req.GetTty(), Stdin: std.in, Stdout: std.out, Stderr: std.err, Resize: std.resize,
		})
	}
}

// serveStdio serves an exec or attach session in the client's protocol.
func (s *Server) serveStdio(w http.ResponseWriter, r *http.Request, session stdioSession) {
	opts, streams := session.options()
	ss, r := s.begin(w, r, streams)
	defer ss.end()
	if !speaks(ss, r, stdioProtocols) {
		return
	}
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

// stdioSession is an exec or attach session. As soon as the client has opened the streams, the protocol library calls
// the methods of the session.
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

func (s stdioSession) ExecInContainer(ctx context.Context, _, _, _ string, _ []string, in io.Reader, out, err io.WriteCloser, _ bool,
	resize <-chan remotecommand.TerminalSize, _ time.Duration) error {
	return s.serve(ctx, in, out, err, resize)
}

func (s stdioSession) AttachContainer(ctx context.Context, _, _, _ string, in io.Reader, out, err io.WriteCloser, _ bool,
	resize <-chan remotecommand.TerminalSize) error {
	return s.serve(ctx, in, out, err, resize)
}

// options returns the protocol library's options, and the number of SPDY streams that the client must open.
func (s stdioSession) options() (*remotecommand.Options, int) {
	opts := &remotecommand.Options{Stdin: s.req.GetStdin(), Stdout: s.req.GetStdout(), Stderr: s.req.GetStderr(), TTY: s.req.GetTty()}
	streams := 1 // the error stream; a terminal adds a stream for its sizes
	for _, more := range []bool{opts.Stdin, opts.Stdout, opts.Stderr, opts.TTY} {
		if more {
			streams++
		}
	}
	return opts, streams
}

// serve runs the session with the streams that the request asked for.
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
		defer out.Close() // ends the client's stdout
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

// chunked writes to w until ctx ends, in chunks that every client accepts as a frame (for SPDY, less than 16 MiB).
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

// termSizes converts terminal sizes, until the given channel is closed or ctx ends. It never makes the sender wait: a
// newer size replaces an older size that was not received yet. Over WebSocket, a size that waits would delay the
// client's stdin.
func termSizes(ctx context.Context, from <-chan remotecommand.TerminalSize) <-chan sandbox.TermSize {
	to := make(chan sandbox.TermSize)
	go func() {
		defer close(to)
		var last sandbox.TermSize
		var out chan<- sandbox.TermSize // nil if the last size was already sent
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

// servePortForward serves a port-forward session, which can have any number of connections.
func (s *Server) servePortForward(w http.ResponseWriter, r *http.Request, rt Runtime, req *runtimeapi.PortForwardRequest) {
	if isTunnel(r) {
		w, r = tunnel(w, r)
	}
	ss, r := s.begin(w, r, 0)
	defer ss.end()
	if !speaks(ss, r, forwardProtocols) {
		return
	}
	opts, err := portforward.BuildV4Options(req.GetPort())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if ss.start() != nil {
		return
	}
	portforward.ServePortForward(ss, r, &forwarder{rt, ss, req}, req.GetPodSandboxId(), "", opts,
		s.config.IdleTimeout, s.config.CreationTimeout, portforward.SupportedProtocols)
}

// forwarder forwards the connections of one session. It uses the session's context, because the protocol library's
// context never ends. The library may call PortForward before a stream is answered, so forwarder first waits for the
// answer.
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
		return invalid("port %d was not requested: the session is for %v", port, allowed)
	}
	ctx := f.session.ctx
	err := f.runtime.PortForward(ctx, f.req.GetPodSandboxId(), port, stream)
	if ctx.Err() != nil {
		abort(stream)
		return errors.Join(err, context.Cause(ctx))
	}
	return err
}
