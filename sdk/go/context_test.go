package tripodgrpc

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
)

// fakeClient is a client whose check the test calls itself, because all goroutines of a guest share one thread.
type fakeClient struct {
	code   codes.Code
	checks chan func() bool
}

func (f *fakeClient) gone() codes.Code { return f.code }

func (f *fakeClient) watch(check func() bool) { f.checks <- check }

// contextOf returns the context of a call of f.
func contextOf(t *testing.T, f *fakeClient, timeout time.Duration) (*callContext, func()) {
	t.Helper()
	f.checks = make(chan func() bool, 1)
	ctx, end := newContext(f, metadata.Pairs("k", "v"), "192.0.2.1:5", timeout)
	t.Cleanup(end)
	return ctx.(*callContext), end
}

func TestContextOfCall(t *testing.T) {
	for name, test := range map[string]struct {
		code    codes.Code
		timeout time.Duration
		want    error
	}{
		"the client has gone":  {codes.Canceled, -1, context.Canceled},
		"the deadline is over": {codes.DeadlineExceeded, time.Hour, context.DeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fakeClient{}
			ctx, _ := contextOf(t, f, test.timeout)
			md, _ := metadata.FromIncomingContext(ctx)
			p, ok := peer.FromContext(ctx)
			if !ok || p.Addr.String() != "192.0.2.1:5" || len(md.Get("k")) != 1 {
				t.Errorf("got peer %v and metadata %v", p, md)
			}
			if err := ctx.Err(); err != nil || context.Cause(ctx) != nil {
				t.Errorf("before the end: error %v, cause %v", err, context.Cause(ctx))
			}
			derived, cancel := context.WithCancel(context.WithValue(ctx, f, "value"))
			defer cancel()
			after := make(chan struct{})
			context.AfterFunc(derived, func() { close(after) })
			f.code = test.code
			if check := <-f.checks; !check() {
				t.Error("the check does not end")
			}
			for what, done := range map[string]<-chan struct{}{"the context": ctx.Done(), "a derived one": derived.Done(), "AfterFunc": after} {
				select {
				case <-done:
				case <-time.After(10 * time.Second):
					t.Errorf("%s has not ended", what)
				}
			}
			for what, err := range map[string]error{"the context": ctx.Err(), "its cause": context.Cause(ctx), "a derived one": derived.Err(),
				"its own cause": context.Cause(derived)} {
				if !errors.Is(err, test.want) {
					t.Errorf("%s: got error %v, want %v", what, err, test.want)
				}
			}
			if md, _ := metadata.FromIncomingContext(derived); len(md.Get("k")) != 1 {
				t.Errorf("got metadata %v after Done", md)
			}
		})
	}
}

// TestErrWithoutDone asks only Err, as loops do that compute.
func TestErrWithoutDone(t *testing.T) {
	f := &fakeClient{}
	ctx, end := contextOf(t, f, time.Hour)
	if until, ok := ctx.Deadline(); !ok || time.Until(until) < 59*time.Minute {
		t.Errorf("got deadline %v, %v", until, ok)
	}
	f.code = codes.DeadlineExceeded
	if err := ctx.Err(); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got error %v, want that of a deadline", err)
	}
	end()
	if err := ctx.Err(); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("after the call: error %v, want the first one", err)
	}
	select {
	case <-ctx.Done():
	default:
		t.Error("Done is open after the end")
	}
}

// TestTimerOfCall lets the guest's own timer end the context, which it does only after Done.
func TestTimerOfCall(t *testing.T) {
	ctx, end := contextOf(t, &fakeClient{}, time.Millisecond)
	<-ctx.Done()
	end()
	if err := ctx.Err(); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
		t.Errorf("got error %v and cause %v, want those of a deadline", err, context.Cause(ctx))
	}
}

// TestContextAfterCall is of a goroutine that its handler has left.
func TestContextAfterCall(t *testing.T) {
	for name, before := range map[string]bool{"Done before the end": true, "Done after it": false} {
		t.Run(name, func(t *testing.T) {
			ctx, end := contextOf(t, &fakeClient{}, -1)
			if before {
				ctx.Done()
			}
			end()
			<-ctx.Done()
			if err := ctx.Err(); !errors.Is(err, context.Canceled) {
				t.Errorf("got error %v, want %v", err, context.Canceled)
			}
		})
	}
}
