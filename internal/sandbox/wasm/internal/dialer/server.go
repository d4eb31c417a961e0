package dialer

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/fdpass"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/egress"
)

// orderTime bounds the receipt of an order and the sending of its reply.
const orderTime = 5 * time.Second

// Server serves the pods of a node. Use New.
type Server struct {
	listener *net.UnixListener
	logger   *slog.Logger
	idle     time.Duration

	mu       sync.Mutex
	pods     int // including orders in progress
	timer    *time.Timer
	ended    bool
	draining bool
}

// New makes a server, which owns the listener. Serve returns when the server has had no pods for the time idle.
func New(listener *net.UnixListener, idle time.Duration, logger *slog.Logger) *Server {
	return &Server{listener: listener, logger: logger, idle: idle}
}

// Serve carries out orders until the server is idle. It returns nil then.
func (s *Server) Serve() error {
	s.mu.Lock()
	s.await(s.idle)
	s.mu.Unlock()
	for {
		conn, err := s.listener.AcceptUnix()
		if err != nil {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.ended {
				return nil
			}
			return fmt.Errorf("dialer: %w", err)
		}
		if !s.begin() {
			conn.Close() // the daemon starts another dialer
			return nil
		}
		go func() {
			defer s.end()
			defer conn.Close()
			err := guard.Call(s.logger, "dialer order", func() error { return s.order(conn) })
			if err != nil {
				s.logger.Warn("order failed", "err", err)
			}
		}()
	}
}

// Drain makes Serve return as soon as there are no pods.
func (s *Server) Drain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.draining = true
	if s.pods == 0 {
		s.await(0)
	}
}

// await schedules the end of the server. The caller holds the lock.
func (s *Server) await(idle time.Duration) {
	if s.timer != nil {
		s.timer.Stop()
	}
	s.timer = time.AfterFunc(idle, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.pods == 0 {
			s.ended = true
			s.listener.Close()
		}
	})
}

// begin counts a pod. It returns false if the server has ended.
func (s *Server) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return false
	}
	s.pods++
	return true
}

func (s *Server) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pods--; s.pods > 0 {
		return
	}
	if s.draining {
		s.await(0)
	} else {
		s.await(s.idle)
	}
}

// order receives an order, replies, and serves the pod in the background.
func (s *Server) order(conn *net.UnixConn) error {
	if peer, err := fdpass.PeerOf(conn); err != nil || peer.UID != 0 {
		return fmt.Errorf("process %d of user %d is not the daemon: %w", peer.PID, peer.UID, errors.Join(err, errdefs.ErrPermissionDenied))
	}
	_ = conn.SetDeadline(time.Now().Add(orderTime))
	r := fdpass.NewReader(conn, egress.MaxOrder)
	defer r.Close()
	f, err := r.Next()
	if err != nil {
		return err
	}
	defer f.Close()
	p, failure := newPod(&f, s.logger)
	payload, err := json.Marshal(egress.OrderReply{Error: fdpass.ToWire(failure)})
	if err == nil {
		err = fdpass.Write(conn, egress.MaxOrder, payload, nil)
	}
	if failure != nil || err != nil {
		if p != nil {
			p.close()
		}
		return errors.Join(failure, err)
	}
	s.mu.Lock()
	s.pods++
	s.mu.Unlock()
	go func() {
		defer s.end()
		p.serve()
	}()
	return nil
}

// newPod makes a pod from an order. It takes the order's files.
func newPod(f *fdpass.Frame, logger *slog.Logger) (*pod, error) {
	var o egress.Order
	if err := json.Unmarshal(f.Payload, &o); err != nil {
		return nil, fmt.Errorf("not an order: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	if len(f.Files) != 2 {
		return nil, fmt.Errorf("the order of pod %s has %d files, want 2: %w", o.Pod, len(f.Files), errdefs.ErrInvalidArgument)
	}
	rules, err := egress.ParseRules(o.Rules)
	if err != nil {
		return nil, err
	}
	conn, err := net.FileConn(f.Files[1])
	if err != nil {
		return nil, fmt.Errorf("the connection of pod %s: %w: %w", o.Pod, err, errdefs.ErrInvalidArgument)
	}
	unix, ok := conn.(*net.UnixConn)
	if !ok {
		conn.Close()
		return nil, fmt.Errorf("the connection of pod %s is not a unix socket: %w", o.Pod, errdefs.ErrInvalidArgument)
	}
	var netns *os.File
	netns, f.Files[0] = f.Files[0], nil
	return makePod(o, rules, netns, unix, logger), nil
}
