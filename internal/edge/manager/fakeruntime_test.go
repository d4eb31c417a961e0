package manager

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/runtime"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// fake is a runtime that records the manager's messages and sends those that the test wants.
type fake struct {
	info  runtime.Info
	start func() error // may be nil

	mu      sync.Mutex
	starts  int
	sent    []channel.Message
	grew    chan struct{}
	say     chan channel.Message
	lose    chan struct{} // closed: the connection is lost
	blocked map[int]chan struct{}
	closed  bool
}

func newFake(name, uuid string) *fake {
	return &fake{info: runtime.Info{Type: "test/chan", Name: name, UUID: uuid, APIs: []string{"wasm", "wasi", "channels"},
		MaxModules: channel.MaxModules},
		grew: make(chan struct{}), blocked: map[int]chan struct{}{}}
}

func (f *fake) Info() runtime.Info { return f.info }

func (f *fake) Start(context.Context) (map[string]any, error) {
	if f.start != nil {
		if err := f.start(); err != nil {
			return nil, err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.starts++
	f.say, f.lose = make(chan channel.Message), make(chan struct{})
	return map[string]any{"platform": "test", "uuid": "not this one"}, nil
}

func (f *fake) Send(ctx context.Context, m channel.Message) error {
	f.mu.Lock()
	block, lose := f.blocked[m.Module], f.lose
	f.mu.Unlock()
	if block != nil && !m.Control {
		select {
		case <-block:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	select {
	case <-lose:
		return fmt.Errorf("lost: %w", errdefs.ErrUnavailable)
	default:
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sent = append(f.sent, m)
	close(f.grew)
	f.grew = make(chan struct{})
	return nil
}

func (f *fake) control(ctx context.Context, index, kind int, payload []byte) error {
	return f.Send(ctx, channel.Message{Header: channel.Header{Control: true, Module: index, Arg: kind}, Payload: payload})
}

func (f *fake) Create(ctx context.Context, index int, data wire.ModuleData) error {
	return f.control(ctx, index, wire.Create, data.Bytes())
}

func (f *fake) Delete(ctx context.Context, index int, _ string) error {
	return f.control(ctx, index, wire.Delete, nil)
}

func (f *fake) Stop(ctx context.Context) error { return f.control(ctx, 0, wire.Stop, nil) }

func (f *fake) Adopt(context.Context, int, wire.ModuleData) (bool, error) { return false, nil }

func (f *fake) Cleanup(context.Context, int, string) error { return nil }

func (f *fake) Group(int) string { return "" }

func (f *fake) Receive(ctx context.Context) (channel.Message, error) {
	f.mu.Lock()
	say, lose := f.say, f.lose
	f.mu.Unlock()
	select {
	case m := <-say:
		return m, nil
	case <-lose:
		return channel.Message{}, fmt.Errorf("lost: %w", errdefs.ErrUnavailable)
	case <-ctx.Done():
		return channel.Message{}, ctx.Err()
	}
}

func (f *fake) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	return nil
}

// kill ends the runtime's connection.
func (f *fake) kill() {
	f.mu.Lock()
	defer f.mu.Unlock()
	close(f.lose)
}

// tell sends a message to the manager.
func (f *fake) tell(t testing.TB, control bool, module, arg int, payload string) {
	t.Helper()
	f.mu.Lock()
	say := f.say
	f.mu.Unlock()
	select {
	case say <- channel.Message{Header: channel.Header{Control: control, Module: module, Arg: arg}, Payload: []byte(payload)}:
	case <-time.After(patience):
		t.Fatal("the manager does not read")
	}
}

// open opens a channel of a module.
func (f *fake) open(t testing.TB, module, fd int, flags channel.Flags, topic string) {
	t.Helper()
	f.tell(t, true, module, channel.OpenChannel, string(channel.Open{FD: fd, Flags: flags, Topic: topic}.Append(nil)))
}

// find waits for the n-th message that the manager sent with this header, whatever the module where it is negative.
func (f *fake) find(t testing.TB, control bool, module, arg, n int) channel.Message {
	t.Helper()
	timeout := time.After(patience)
	for {
		f.mu.Lock()
		seen, grew := 0, f.grew
		for _, m := range f.sent {
			if m.Control == control && m.Arg == arg && (module < 0 || m.Module == module) {
				if seen++; seen == n {
					f.mu.Unlock()
					return m
				}
			}
		}
		f.mu.Unlock()
		select {
		case <-grew:
		case <-timeout:
			t.Fatalf("the manager did not send message %d with control %v, module %d, argument %d, but %d others", n, control, module, arg,
				len(f.sent))
		}
	}
}

func (f *fake) count(control bool, arg int) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, m := range f.sent {
		if m.Control == control && m.Arg == arg {
			n++
		}
	}
	return n
}

func asRuntimes(all ...runtime.Runtime) []runtime.Runtime { return all }

// rig is a manager with one or two runtimes on a bus.
type rig struct {
	*bus
	t    testing.TB
	m    *Manager
	a, b *fake
	conf Config
	log  string // file of the manager's log
}

func newRig(t testing.TB, change func(*Config), with ...func(*bus)) *rig {
	t.Helper()
	r := &rig{bus: newBus(), t: t, a: newFake("a", runtimeA), b: newFake("b", runtimeB), log: filepath.Join(t.TempDir(), "log")}
	log, err := os.Create(r.log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { log.Close() })
	r.conf = Config{Root: t.TempDir(), UUID: managerID, Name: "node", Topics: topics, Dial: r.dial,
		Log:      slog.New(slog.NewTextHandler(log, nil)),
		Runtimes: []runtime.Runtime{r.a, r.b}, BackoffMin: 10 * time.Millisecond, BackoffMax: 100 * time.Millisecond}
	if change != nil {
		change(&r.conf)
	}
	for _, f := range with {
		f(r.bus)
	}
	r.open()
	t.Cleanup(r.close)
	if !r.silent && !r.away {
		r.find(t, topics.Reg(runtimeA), 1, isAction(wire.ActionCreate))
		r.find(t, topics.Reg(runtimeB), 1, isAction(wire.ActionCreate))
	}
	return r
}

func (r *rig) open() {
	r.t.Helper()
	var err error
	if r.m, err = Open(r.conf); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) close() {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := r.m.Close(ctx); err != nil {
		r.t.Error(err)
	}
}

func (r *rig) client() *busClient { return r.m.client.(*busClient) }

// order sends a control message to a runtime.
func (r *rig) order(rt, action string, data map[string]any) {
	r.publish(topics.ControlOf(rt), false, envelope(action, data))
}

func envelope(action string, data map[string]any) []byte {
	return wire.Envelope{ObjectID: newID(), Action: action, Type: wire.Request, Data: object(data)}.Bytes()
}

func moduleData(uuid string, more ...any) map[string]any {
	data := map[string]any{"type": "module", "uuid": uuid, "name": "m-" + uuid}
	for i := 0; i+1 < len(more); i += 2 {
		data[more[i].(string)] = more[i+1]
	}
	return data
}

// exitedOf waits for the module's n-th exit and returns its data.
func (r *rig) exitedOf(rt, uuid string, n int) map[string]any {
	r.t.Helper()
	return dataOf(r.t, r.find(r.t, topics.ControlOf(rt), n, isExit(uuid)))
}

// errorWith waits for the n-th error answer and returns its description.
func (r *rig) errorWith(n int) string {
	r.t.Helper()
	data := dataOf(r.t, r.find(r.t, topics.Errors(), n, isError))
	desc, _ := data["desc"].(string)
	if _, ok := data["data"]; desc == "" || !ok {
		r.t.Errorf("an error answer without desc or data: %v", data)
	}
	return desc
}
