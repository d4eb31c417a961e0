package worker

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

const sumProto = examples + "raw-c/sum.proto"

// rawServer starts a pod with a guest of the raw world and the services of sum.proto.
func rawServer(tb testing.TB, binary string, limits workerapi.Limits, memory int64) *server {
	tb.Helper()
	return newServingOn(tb, channelEngine(), binary, sumProto,
		workerapi.PodSpec{Limits: limits, Resources: workerapi.Resources{MemoryBytes: memory}})
}

// faulty returns the method of testdata/raw-faults.c with a fault. Endless ones are streaming methods, whose only limit
// in time is the compute budget.
func faulty(tb testing.TB, s *server, fault string) *dataplane.Method {
	like := "/sum.v1.Sums/Add"
	if strings.HasPrefix(fault, "endless-") {
		like = "/sum.v1.Sums/Running"
	}
	return &dataplane.Method{Procedure: "/f/" + fault, Desc: s.methodOf(tb, like).Desc}
}

// codeOf returns the status that a client gets for an error of Invoke.
func codeOf(err error) (codes.Code, string) {
	if err == nil {
		return codes.OK, ""
	}
	if st, ok := errors.AsType[*dataplane.Status](err); ok {
		return st.Code, st.Message
	}
	return codes.Unknown, err.Error()
}

// TestRawMalformedAnswers: a guest of the raw world that breaks the contract fails its own call with a clear status, and
// the next call succeeds.
func TestRawMalformedAnswers(t *testing.T) {
	s := rawServer(t, "testdata/raw-faults.wasm", workerapi.Limits{RequestTimeout: 2 * time.Second}, 64<<20)
	for fault, want := range map[string]struct {
		code codes.Code
		text string
	}{
		"result-out-of-bounds":  {codes.Internal, "trapped: canonical ABI"},
		"result-not-aligned":    {codes.Internal, "trapped: canonical ABI"},
		"unknown-case":          {codes.Internal, "trapped: canonical ABI"},
		"status-ok":             {codes.Unknown, "invalid status code 0: all is well"},
		"status-99":             {codes.Unknown, "invalid status code 99: what is this"},
		"message-out-of-bounds": {codes.Internal, "trapped: canonical ABI"},
		"message-not-utf8":      {codes.Internal, "trapped: canonical ABI"},
		"endless-details":       {codes.Internal, "trapped: canonical ABI"},
		"details-not-any":       {codes.NotFound, "x"}, // passed on as they are, like any server's
		"two-answers":           {codes.Internal, "already sent"},
		"send-out-of-bounds":    {codes.Internal, "trapped: canonical ABI"},
		"send-100-mib":          {codes.Internal, "trapped: canonical ABI"}, // its memory is smaller
		"take-without-message":  {codes.Internal, "trapped: host function failed"},
		"take-twice":            {codes.Internal, "trapped: host function failed"},
		"endless-receive":       {codes.DeadlineExceeded, ""},
		"endless-loop":          {codes.DeadlineExceeded, ""},
		"endless-header":        {codes.ResourceExhausted, "limits"},
		"header-reserved":       {codes.Internal, `the component's response: metadata key "grpc-status" is reserved`},
		"trap":                  {codes.Internal, "trapped: unreachable"},
		"exit":                  {codes.Internal, "exited"},
		"memory":                {codes.ResourceExhausted, "memory"},
	} {
		t.Run(fault, func(t *testing.T) {
			c := &streamCall{messages: [][]byte{nil}, one: true}
			code, text := codeOf(s.Invoke(t.Context(), faulty(t, s, fault), c))
			if code != want.code || !strings.Contains(text, want.text) {
				t.Errorf("status = %v %q; want %v with %q", code, text, want.code, want.text)
			}
			require.NoError(t, s.Invoke(t.Context(), faulty(t, s, "good"), &streamCall{one: true}))
		})
	}
	c := &streamCall{one: true}
	require.NoError(t, s.Invoke(t.Context(), faulty(t, s, "no-answer"), c)) // the dataplane makes INTERNAL of it
	require.Empty(t, c.sent)
	require.Zero(t, s.pod.account.Instances(), "instances that remain")
}

// TestRawNoticesItsEnd: a guest has a moment after the end of its call to return by itself, and then its instance can be
// reused. A guest that does not return is killed.
func TestRawNoticesItsEnd(t *testing.T) {
	s := rawServer(t, "testdata/raw-faults.wasm", workerapi.Limits{RequestTimeout: time.Minute, Reuse: true}, 0)
	end := func(fault string) (codes.Code, string) {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		begin := time.Now()
		code, text := codeOf(s.Invoke(ctx, faulty(t, s, fault), &streamCall{one: true}))
		if took := time.Since(begin); took > soon {
			t.Errorf("%s: the call ended after %v", fault, took)
		}
		return code, text
	}
	if code, text := end("endless-loop"); code != codes.DeadlineExceeded || len(s.pool.idle) != 0 {
		t.Errorf("endless-loop: status = %v %q and %d instances are kept; want DeadlineExceeded and none", code, text, len(s.pool.idle))
	}
	// A busy machine may give the guest no turn in its moment; then it is killed as well.
	require.Eventually(t, func() bool {
		code, _ := end("until-ended")
		return code == codes.Canceled && len(s.pool.idle) == 1
	}, soon, time.Millisecond, "no guest returned by itself")
}

// TestRawWaitEndsWithCall: at the end of the call, a guest that waits by events learns from receive why the call ended,
// and its instance is kept.
func TestRawWaitEndsWithCall(t *testing.T) {
	s := rawServer(t, "testdata/raw-faults.wasm", workerapi.Limits{Reuse: true}, 0)
	m := &dataplane.Method{Procedure: "/f/poll", Desc: s.methodOf(t, "/sum.v1.Sums/Running").Desc}
	for range 3 {
		c := newWaitingCall()
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		code, text := codeOf(s.Invoke(ctx, m, c))
		cancel()
		require.Equal(t, codes.DeadlineExceeded, code, text)
		require.Equal(t, "the request's deadline has passed", text)
		require.Zero(t, c.received.Load(), "waits that remain")
		require.Len(t, s.pool.idle, 1)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	require.NoError(t, s.Invoke(ctx, m, newWaitingCall())) // nobody gets this answer
	require.Len(t, s.pool.idle, 1)
}

// TestRawEventsEndWithCall: the descriptor of events is one per call and is closed with the call, so that an instance can
// be reused without end.
func TestRawEventsEndWithCall(t *testing.T) {
	const descriptors = 2048 // of a guest
	s := rawServer(t, "testdata/raw-faults.wasm", workerapi.Limits{Reuse: true}, 0)
	for n := range descriptors + 1 {
		if code, text := codeOf(s.Invoke(t.Context(), faulty(t, s, "events"), &streamCall{one: true})); code != codes.OK {
			t.Fatalf("call %d: %v %s", n, code, text)
		}
	}
	require.Len(t, s.pool.idle, 1)
}

// waitingCall is a bidirectional call whose client sends when the test does.
type waitingCall struct {
	streamCall
	in, out  chan string
	broken   chan struct{} // closed by Interrupt
	received atomic.Int32  // calls of Receive in progress
}

func newWaitingCall() *waitingCall {
	return &waitingCall{in: make(chan string), out: make(chan string, 100), broken: make(chan struct{})}
}

func (c *waitingCall) Receive() ([]byte, error) {
	c.received.Add(1)
	defer c.received.Add(-1)
	select {
	case m, ok := <-c.in:
		if !ok {
			return nil, io.EOF
		}
		return []byte(m), nil
	case <-c.broken:
		return nil, dataplane.Errorf(codes.Canceled, "interrupted")
	}
}

func (c *waitingCall) Send(m []byte) error {
	c.out <- string(m)
	return nil
}

func (c *waitingCall) Interrupt() { close(c.broken) }

// TestRawWaitsBesideOthers: a guest waits for its client and its clock at once, so that a runtime with goroutines can run
// others meanwhile.
func TestRawWaitsBesideOthers(t *testing.T) {
	s := rawServer(t, "testdata/raw-faults.wasm", workerapi.Limits{}, 0)
	c := newWaitingCall()
	m := &dataplane.Method{Procedure: "/f/poll", Desc: s.methodOf(t, "/sum.v1.Sums/Running").Desc}
	done := make(chan error, 1)
	go func() { done <- s.Invoke(t.Context(), m, c) }()
	next := func(skip string) string {
		for {
			select {
			case got := <-c.out:
				if got != skip {
					return got
				}
			case <-time.After(soon):
				t.Fatal("the guest has sent nothing")
			}
		}
	}
	require.Equal(t, "tick", next("")) // nothing has arrived
	for _, message := range []string{"one", "two"} {
		c.in <- message
		require.Equal(t, message, next("tick"))
		require.Equal(t, "tick", next(""))
	}
	close(c.in)
	require.NoError(t, <-done)
}

// TestRawLeavesAWait: a guest that returns while a message is awaited ends the wait with its call.
func TestRawLeavesAWait(t *testing.T) {
	s := rawServer(t, "testdata/raw-faults.wasm", workerapi.Limits{Reuse: true}, 0)
	for range 3 {
		c := newWaitingCall()
		m := &dataplane.Method{Procedure: "/f/leave", Desc: s.methodOf(t, "/sum.v1.Sums/Running").Desc}
		require.NoError(t, s.Invoke(t.Context(), m, c))
		require.Zero(t, c.received.Load(), "waits that remain")
	}
	require.Len(t, s.pool.idle, 1)
}

// TestRawC: the example in C serves unary and streaming methods without conversion of messages.
func TestRawC(t *testing.T) {
	s := rawServer(t, examples+"raw-c/raw-c.wasm", workerapi.Limits{}, 0)
	c := &streamCall{messages: [][]byte{{0x0a, 3, 1, 2, 0x7f}}, one: true}
	require.NoError(t, s.Invoke(t.Context(), s.methodOf(t, "/sum.v1.Sums/Add"), c))
	require.Equal(t, [][]byte{{8, 0x82, 1}}, c.sent)
	c = &streamCall{messages: [][]byte{{8, 1}, {8, 2, 8, 3}, {}}}
	require.NoError(t, s.Invoke(t.Context(), s.methodOf(t, "/sum.v1.Sums/Running"), c))
	require.Equal(t, [][]byte{{8, 1}, {8, 6}, {8, 6}}, c.sent)
	for name, bad := range map[string][]byte{"cut off": {0x0a, 9, 1}, "empty": {}, "group": {0x0b}} {
		code, _ := codeOf(s.Invoke(t.Context(), s.methodOf(t, "/sum.v1.Sums/Add"), &streamCall{messages: [][]byte{bad}, one: true}))
		require.Equal(t, codes.InvalidArgument, code, name)
	}
}

// TestLargeMessageIsFreed: an instance that is reused does not keep the memory of a large message.
func TestLargeMessageIsFreed(t *testing.T) {
	s := rawServer(t, examples+"raw-c/raw-c.wasm", workerapi.Limits{Reuse: true}, 0)
	for _, n := range []int{1, maxKept} {
		c := &streamCall{messages: [][]byte{bytes.Repeat([]byte{8, 1}, n)}}
		require.NoError(t, s.Invoke(t.Context(), s.methodOf(t, "/sum.v1.Sums/Running"), c))
		require.Len(t, c.sent, 1)
		require.LessOrEqual(t, cap(s.pool.idle[0].call.reply), maxKept)
	}
}

// streamCall is a call without a network.
type streamCall struct {
	oneCall
	messages [][]byte
	sent     [][]byte
	one      bool // the method sends one message
}

func (c *streamCall) Receive() ([]byte, error) {
	if len(c.messages) == 0 {
		return nil, io.EOF
	}
	m := c.messages[0]
	c.messages = c.messages[1:]
	return m, nil
}

func (c *streamCall) Send(m []byte) error {
	if c.one && len(c.sent) > 0 {
		return dataplane.Errorf(codes.Internal, "the method sends one message and has already sent it")
	}
	c.sent = append(c.sent, bytes.Clone(m))
	return nil
}

func (c *streamCall) ResponseHeader() http.Header {
	if c.header == nil {
		c.header = http.Header{}
	}
	return c.header
}

// TestAheadMemory checks that the rests of half-duplex streams count for their pod and for its worker.
func TestAheadMemory(t *testing.T) {
	s := rawServer(t, "testdata/raw-faults.wasm", workerapi.Limits{}, 0)
	s.pod.account.Bound(engine.HeldBytes, 100)
	m := aheadMemory{s.pod}
	require.False(t, m.TryAcquire(101), "more than the pod can hold")
	require.True(t, m.TryAcquire(100))
	require.EqualValues(t, 100, s.pod.account.Held(engine.HeldBytes))
	m.Release(100)
	require.Zero(t, s.pod.account.Held(engine.HeldBytes))
	s.pod.account.Bound(engine.HeldBytes, 0)
	require.False(t, m.TryAcquire(dataplane.AheadMemory+1), "more than the worker has")
	require.True(t, m.TryAcquire(dataplane.AheadMemory))
	require.False(t, aheadMemory{s.pod}.TryAcquire(1))
	m.Release(dataplane.AheadMemory)
	require.Zero(t, s.pod.account.Held(engine.HeldBytes))
}

// TestRawReceiveEnds checks that the end of a call ends each way to wait for its client, and that the instance is reused.
// The client neither sends nor disconnects.
func TestRawReceiveEnds(t *testing.T) {
	for _, guest := range []struct{ binary, method string }{
		{"testdata/raw-faults.wasm", "/f/poll"},
		{examples + "raw-c/raw-c.wasm", "/sum.v1.Sums/Running"},
	} {
		s := rawServer(t, guest.binary, workerapi.Limits{Reuse: true}, 0)
		m := &dataplane.Method{Procedure: guest.method, Desc: s.methodOf(t, "/sum.v1.Sums/Running").Desc}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		c := newWaitingCall()
		begin := time.Now()
		code, text := codeOf(s.Invoke(ctx, m, c))
		require.Equal(t, codes.DeadlineExceeded, code, "%s: %s", guest.method, text)
		require.Less(t, time.Since(begin), soon, guest.method)
		require.Len(t, s.pool.idle, 1, "%s: instances that are kept", guest.method)
		require.Zero(t, c.received.Load(), "waits that remain")
		ctx, cancel = context.WithCancel(t.Context())
		time.AfterFunc(100*time.Millisecond, cancel)
		_ = s.Invoke(ctx, m, newWaitingCall()) // the guest can succeed: nobody waits for its answer
		require.Len(t, s.pool.idle, 1, "%s: instances that are kept", guest.method)
	}
}
