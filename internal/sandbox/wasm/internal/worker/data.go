package worker

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// ServeData answers the requests of the node's router on a listener, by cleartext HTTP/2 and HTTP/1.1, until ctx ends. The
// header workerapi.HeaderContainer, which the pod does not see, says which pod a request is for, and workerapi.HeaderPeer
// who its client is.
func (w *Worker) ServeData(ctx context.Context, listener *net.UnixListener) error {
	protocols := &http.Protocols{}
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	s := &http.Server{
		Handler: http.HandlerFunc(w.route), Protocols: protocols, ReadHeaderTimeout: 30 * time.Second,
		HTTP2: &http.HTTP2Config{MaxConcurrentStreams: 10_000},
	}
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	err := s.Serve(&trusted{listener, w})
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("data socket: %w", err)
}

// trusted lets in those that the control socket lets in.
type trusted struct {
	*net.UnixListener
	worker *Worker
}

func (t *trusted) Accept() (net.Conn, error) {
	for {
		conn, err := t.AcceptUnix()
		if err != nil {
			return nil, err
		}
		if err = workerapi.CheckPeer(conn); err == nil {
			return conn, nil
		}
		t.worker.logger.Warn("a connection to the data socket was refused", "err", err)
		conn.Close()
	}
}

func (w *Worker) route(rw http.ResponseWriter, r *http.Request) {
	id := r.Header.Get(workerapi.HeaderContainer)
	r.Header.Del(workerapi.HeaderContainer)
	if peer := r.Header.Get(workerapi.HeaderPeer); peer != "" { // the connection is the router's
		r.RemoteAddr = peer
		r.Header.Del(workerapi.HeaderPeer)
	}
	p, err := w.pod(id)
	if err != nil {
		http.Error(rw, err.Error(), http.StatusServiceUnavailable)
		return
	}
	s, ok := p.program.(*server)
	if !ok {
		http.Error(rw, fmt.Sprintf("pod %s is a command and serves no requests", id), http.StatusServiceUnavailable)
		return
	}
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	defer onEnd(p.alive, func() {
		// The pod's own connections are closed when its grace is over; the router's stays, and what waits on it is woken.
		cancel(errStopping)
		rc := http.NewResponseController(rw)
		_ = rc.SetReadDeadline(time.Now())
		_ = rc.SetWriteDeadline(time.Now().Add(time.Second)) // for the status
	})()
	s.ServeHTTP(rw, r.WithContext(ctx))
}

// onEnd is context.AfterFunc whose stop waits for f, if it runs: f may use what is gone when the handler has returned.
func onEnd(ctx context.Context, f func()) (stop func()) {
	ran := make(chan struct{})
	cancel := context.AfterFunc(ctx, func() {
		defer close(ran)
		f()
	})
	return func() {
		if !cancel() {
			<-ran
		}
	}
}
