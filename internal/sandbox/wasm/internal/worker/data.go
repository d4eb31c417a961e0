package worker

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// ServeData serves requests from the node's router over cleartext HTTP/2 and HTTP/1.1 until ctx ends. The header
// workerapi.HeaderContainer contains the pod's ID. The header workerapi.HeaderPeer contains the client's address. Pods
// do not see these headers.
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
	err := s.Serve(&peerListener{listener, w})
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("data socket: %w", err)
}

// peerListener accepts only the peers that the control socket accepts.
type peerListener struct {
	*net.UnixListener
	worker *Worker
}

func (t *peerListener) Accept() (net.Conn, error) {
	for {
		conn, err := t.AcceptUnix()
		if err != nil {
			return nil, err
		}
		if err = workerapi.CheckPeer(conn); err == nil {
			return conn, nil
		}
		t.worker.logger.Warn("data connection refused", "err", err)
		conn.Close()
	}
}

func (w *Worker) route(rw http.ResponseWriter, r *http.Request) {
	id := r.Header.Get(workerapi.HeaderContainer)
	r.Header.Del(workerapi.HeaderContainer)
	if peer := r.Header.Get(workerapi.HeaderPeer); peer != "" { // otherwise RemoteAddr is the router's
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
	defer afterDone(p.alive, func() {
		// When the grace period expires, the pod's own connections are closed. The router's connection also serves
		// other pods and stays open, so unblock only this request's reads and writes.
		cancel(errStopping)
		rc := http.NewResponseController(rw)
		_ = rc.SetReadDeadline(time.Now())
		_ = rc.SetWriteDeadline(time.Now().Add(time.Second)) // time to send the status
	})()
	s.ServeHTTP(rw, r.WithContext(ctx))
}

// afterDone is like context.AfterFunc, but the returned function also waits for f if f is already running. Otherwise, f
// could use the ResponseWriter after the handler has returned.
func afterDone(ctx context.Context, f func()) (stop func()) {
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
