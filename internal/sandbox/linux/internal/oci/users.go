package oci

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/tripod-run/tripod/internal/guard"
)

// The trial of user namespaces is repeated after usersFirstPause, and after longer and longer pauses up to usersLastPause.
const (
	usersFirstPause = 5 * time.Second
	usersLastPause  = 5 * time.Minute
)

// UsersTrial knows whether containers can have user namespaces. A trial that failed is repeated until it succeeds: the node may
// have been too busy, or an administrator may raise a limit (user.max_user_namespaces) or open a directory. The kubelet
// asks again by itself (RuntimeHandlerFeatures). A success is final, because existing containers depend on it.
type UsersTrial struct {
	err  atomic.Pointer[error]
	stop context.CancelFunc
	done chan struct{}
}

// NewUsersTrial starts with the result of the first trial.
func NewUsersTrial(err error) *UsersTrial {
	u := &UsersTrial{done: make(chan struct{})}
	u.err.Store(&err)
	return u
}

// Reason returns why containers cannot have user namespaces, or nil if they can.
func (u *UsersTrial) Reason() error { return *u.err.Load() }

// Begin repeats a failed trial in the background until End is called.
func (u *UsersTrial) Begin(log *slog.Logger, try func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	u.stop = cancel
	if u.Reason() == nil {
		close(u.done)
		return
	}
	log.Warn("pods cannot have user namespaces", "err", u.Reason())
	go guard.Func(log, "trials of user namespaces", func() {
		defer close(u.done)
		for pause := usersFirstPause; u.Reason() != nil && guard.Sleep(ctx, pause) == nil; pause = min(2*pause, usersLastPause) {
			u.repeat(ctx, log, try)
		}
	})()
}

// repeat makes one trial.
func (u *UsersTrial) repeat(ctx context.Context, log *slog.Logger, try func(context.Context) error) {
	ctx, cancel := context.WithTimeout(ctx, probeDeadline)
	defer cancel()
	err := try(ctx)
	if err == nil {
		log.Info("pods can have user namespaces")
	}
	u.err.Store(&err)
}

// End ends the trials, and waits for one that is under way.
func (u *UsersTrial) End() {
	if u.stop == nil { // there are none
		return
	}
	u.stop()
	<-u.done
}
