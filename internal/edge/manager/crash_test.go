package manager

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/runtime"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/node/store"
	"github.com/tripod-run/tripod/test/races"
)

const (
	// worldVariable turns the test program into a daemon with the world in a directory (see daemon).
	worldVariable = "TRIPOD_EDGE_MANAGER_TEST"

	// killVariable names a step; the daemon kills itself after that step, before the step counts as done.
	killVariable = "TRIPOD_EDGE_MANAGER_TEST_KILL"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(worldVariable); dir != "" {
		if err := daemon(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(races.Run(m.Run))
}

// daemon runs a manager until all orders are obeyed. Its world is in files that outlive it: the running modules, the
// messages that reached the broker, and the acknowledged orders.
func daemon(dir string) error {
	if err := failpoint.Check(); err != nil {
		return err
	}
	w := &world{dir: dir, bus: newBus(), say: make(chan channel.Message, 64)}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	m, err := Open(Config{Root: dir, UUID: managerID, Name: "node", Topics: topics, Runtimes: []runtime.Runtime{w}, Dial: w.dial,
		BackoffMin: time.Millisecond, BackoffMax: 10 * time.Millisecond, RegisterTimeout: time.Second})
	if err != nil {
		return err
	}
	for i, step := range w.steps() {
		if w.has("done", fmt.Sprint(i)) {
			continue
		}
		if err := step(ctx); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
		if os.Getenv(killVariable) == fmt.Sprint(i) {
			if err := poll(ctx, func() bool { return w.agrees(m) }); err != nil {
				return fmt.Errorf("step %d has no full effect, %v run: %w", i, w.running(), err)
			}
			return syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
		w.note("done", fmt.Sprint(i))
	}
	settled := func() bool { return w.agrees(m) && slices.Equal(w.running(), []string{"d1", "m1"}) }
	if err := poll(ctx, settled); err != nil {
		return fmt.Errorf("it does not settle, %v run: %w", w.running(), err)
	}
	return m.Close(ctx)
}

// agrees reports whether the manager has exactly the modules that run, as running modules, and no exit that the broker
// has not acknowledged.
func (w *world) agrees(m *Manager) bool {
	var uuids []string
	for _, mod := range m.hosts[0].reportNow().Modules {
		if mod.State != string(running) {
			return false
		}
		uuids = append(uuids, mod.UUID)
	}
	slices.Sort(uuids)
	m.exits.mu.Lock()
	defer m.exits.mu.Unlock()
	return len(m.exits.all) == 0 && slices.Equal(w.running(), uuids)
}

func poll(ctx context.Context, condition func() bool) error {
	for !condition() {
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// world is a runtime whose modules are files, and a broker that remembers messages.
type world struct {
	dir string
	bus *bus
	say chan channel.Message

	mu sync.Mutex // serializes the calls that read and write modules
}

// steps returns the orders in sequence; each returns once the manager has accepted it. A daemon that was killed before
// it noted a step leaves that step to the next daemon, so each step must succeed again after it has had its full effect.
func (w *world) steps() []func(context.Context) error {
	doc := func(modules ...map[string]any) []byte { return object(map[string]any{"modules": modules}) }
	order := func(i int, action, uuid string) func(context.Context) error {
		e := wire.Envelope{ObjectID: fmt.Sprint("order-", i), Action: action, Type: wire.Request, Data: object(moduleData(uuid))}
		return w.deliver(topics.ControlOf(runtimeA), e.Bytes())
	}
	return []func(context.Context) error{
		order(0, wire.ActionCreate, "m1"),
		order(1, wire.ActionCreate, "m2"),
		order(2, wire.ActionCreate, "m3"),
		w.await("m1", "m2", "m3"),
		order(3, wire.ActionDelete, "m2"),
		w.deliver(topics.Desired(runtimeA), doc(moduleData("d1"), moduleData("d2", "restart", "never"))),
		w.await("d1", "d2", "m1", "m3"),
		func(context.Context) error { return w.endOnce("m3", status(5, "exited", "")) },
		w.deliver(topics.Desired(runtimeA), doc(moduleData("d1"))),
		w.await("d1", "m1"),
	}
}

// deliver passes a message to the manager and waits until the manager has processed it, like a broker with QoS 2.
func (w *world) deliver(topic string, payload []byte) func(context.Context) error {
	return func(ctx context.Context) error {
		c := w.bus.clients[0]
		taken := make(chan struct{})
		if err := poll(ctx, func() bool { w.bus.mu.Lock(); defer w.bus.mu.Unlock(); return len(c.filters) >= 4 }); err != nil {
			return err
		}
		go func() {
			c.config.Handler(mqtt.Message{Topic: topic, Payload: payload, QoS: 2})
			close(taken)
		}()
		select {
		case <-taken:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (w *world) await(uuids ...string) func(context.Context) error {
	return func(ctx context.Context) error {
		return poll(ctx, func() bool { return slices.Equal(w.running(), uuids) })
	}
}

// dial connects to the bus; messages published there are written to a file immediately.
func (w *world) dial(c mqtt.Config) (mqtt.Client, error) {
	cl, err := w.bus.dial(c)
	return &recording{Client: cl, w: w}, err
}

// recording is a client that keeps exits in memory, like the real one, until a goroutine of its own has brought them to the
// broker. A kill before that loses them.
type recording struct {
	mqtt.Client
	w *world

	mu       sync.Mutex
	bringing sync.WaitGroup
}

func (r *recording) PublishThen(ctx context.Context, topic string, qos byte, retain bool, payload []byte, settled func(bool)) error {
	e, err := wire.ParseEnvelope(payload)
	if err != nil || e.Action != wire.ActionExited {
		return r.Client.PublishThen(ctx, topic, qos, retain, payload, settled)
	}
	data, _ := wire.ParseModuleData(e.Data)
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.Client.PublishThen(ctx, topic, qos, retain, payload, nil); err != nil {
		return err
	}
	r.bringing.Go(func() {
		r.w.note("told", data.UUID()+" "+string(data["status"]))
		if settled != nil {
			settled(true)
		}
	})
	return nil
}

// Close waits for the goroutines, which write below a directory of the test.
func (r *recording) Close(ctx context.Context) error {
	err := r.Client.Close(ctx)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.bringing.Wait()
	return err
}

// note appends a line to a file of the world.
func (w *world) note(file, line string) {
	f, err := os.OpenFile(filepath.Join(w.dir, file), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err == nil {
		_, err = fmt.Fprintln(f, line)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		panic(err)
	}
}

func (w *world) lines(file string) []string {
	raw, _ := os.ReadFile(filepath.Join(w.dir, file))
	return strings.FieldsFunc(string(raw), func(r rune) bool { return r == '\n' })
}

func (w *world) has(file, line string) bool { return slices.Contains(w.lines(file), line) }

func (w *world) path(uuid string) string { return filepath.Join(w.dir, "modules", uuid) }

// running returns the running modules, sorted.
func (w *world) running() []string {
	entries, _ := os.ReadDir(filepath.Join(w.dir, "modules"))
	var all []string
	for _, e := range entries {
		if raw, err := os.ReadFile(w.path(e.Name())); err == nil && !bytes.Contains(raw, []byte("{")) {
			all = append(all, e.Name())
		}
	}
	return all
}

// write replaces a module's file atomically: "INDEX", then the exit's payload if it has ended.
func (w *world) write(uuid, text string) error {
	return errors.Join(os.MkdirAll(filepath.Join(w.dir, "modules"), 0o700), os.WriteFile(w.path(uuid)+"~", []byte(text), 0o600),
		os.Rename(w.path(uuid)+"~", w.path(uuid)))
}

func (w *world) read(uuid string) (index int, payload string, err error) {
	raw, err := os.ReadFile(w.path(uuid))
	if err != nil {
		return 0, "", fmt.Errorf("module %s: %w", uuid, errdefs.ErrNotFound)
	}
	first, payload, _ := strings.Cut(string(raw), " ")
	_, err = fmt.Sscan(first, &index)
	return index, payload, err
}

// end ends a module and reports the exit.
func (w *world) end(uuid string, payload []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	index, before, err := w.read(uuid)
	if err != nil || before != "" {
		return err
	}
	if err := w.write(uuid, fmt.Sprint(index, " ", string(payload))); err != nil {
		return err
	}
	w.say <- channel.Message{Header: channel.Header{Control: true, Module: index, Arg: wire.Exited}, Payload: payload}
	return nil
}

// endOnce is like end, and succeeds also if the module is gone because an earlier daemon cleaned up after this end.
func (w *world) endOnce(uuid string, payload []byte) error {
	err := w.end(uuid, payload)
	if errdefs.IsNotFound(err) && w.has("cleaned", uuid+" "+string(payload)) {
		return nil
	}
	return err
}

func (w *world) Info() runtime.Info {
	return runtime.Info{Type: "test/world", Name: "world", UUID: runtimeA, MaxModules: 8, Durable: true}
}

func (w *world) Start(context.Context) (map[string]any, error) { return nil, nil }

func (w *world) Send(context.Context, channel.Message) error { return nil }

func (w *world) Receive(ctx context.Context) (channel.Message, error) {
	select {
	case m := <-w.say:
		return m, nil
	case <-ctx.Done():
		return channel.Message{}, ctx.Err()
	}
}

func (w *world) Stop(context.Context) error { return nil }

func (w *world) Group(int) string { return "" }

func (w *world) Close() error { return nil }

func (w *world) Create(_ context.Context, index int, data wire.ModuleData) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, _, err := w.read(data.UUID()); err == nil {
		w.note("twice", data.UUID())
	}
	w.note("created", data.UUID())
	return w.write(data.UUID(), fmt.Sprint(index))
}

func (w *world) Delete(_ context.Context, _ int, uuid string) error {
	return w.end(uuid, status(137, "killed", ""))
}

// Cleanup notes how the module had ended before it removes the file, so that a kill between the two loses nothing.
func (w *world) Cleanup(_ context.Context, _ int, uuid string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, payload, err := w.read(uuid); err == nil {
		w.note("cleaned", uuid+" "+payload)
	}
	if err := os.Remove(w.path(uuid)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

func (w *world) Adopt(_ context.Context, index int, data wire.ModuleData) (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	at, payload, err := w.read(data.UUID())
	switch {
	case err != nil:
		return false, nil
	case at != index:
		return false, fmt.Errorf("module %s is at %d, not at %d: %w", data.UUID(), at, index, errdefs.ErrInternal)
	case payload != "":
		w.say <- channel.Message{Header: channel.Header{Control: true, Module: index, Arg: wire.Exited}, Payload: []byte(payload)}
	}
	return true, nil
}

// TestKilledAtEachLine kills the daemon at each fail point and checks the next one: every module that should run does,
// no module was started twice, every exit is reported, and nothing is left in the record.
func TestKilledAtEachLine(t *testing.T) {
	failpoint.Needed(t)
	points := slices.DeleteFunc(failpoint.Names(), func(name string) bool { return !strings.HasPrefix(name, "edge.manager.") })
	if len(points) < 12 {
		t.Fatalf("only %d points: %v", len(points), points)
	}
	for _, point := range points {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			for _, times := range []string{"", "second"} {
				w := &world{dir: t.TempDir()}
				killed := false
				if times == "" {
					killed = w.run(t, failpoint.Variable+"="+point+"=kill")
				} else {
					killed = w.runLate(t, point)
				}
				if !killed && times == "" {
					killed = w.run(t, failpoint.Variable+"="+point+"=kill") // a line of the way back
				}
				if !killed && times == "" {
					t.Fatal("the daemon never came to this line")
				}
				w.run(t)
				w.check(t)
			}
		})
	}
}

// runLate lets the daemon obey the first orders, and then kills it at the fail point.
func (w *world) runLate(t *testing.T, point string) bool {
	w.run(t, failpoint.Variable+"=edge.manager.delete.recorded=kill")
	return w.run(t, failpoint.Variable+"="+point+"=kill")
}

// TestKilledAfterEachStep kills the daemon after a step has had its full effect, before the step counts as done. The next
// daemon gets the step again, as a broker delivers an order again whose acknowledgement was lost.
func TestKilledAfterEachStep(t *testing.T) {
	for i := range (&world{}).steps() {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			w := &world{dir: t.TempDir()}
			if !w.run(t, killVariable+"="+fmt.Sprint(i)) {
				t.Fatal("the daemon was not killed")
			}
			w.run(t)
			w.check(t)
		})
	}
}

// TestKilledAtAnyTime kills one daemon after another at random moments.
func TestKilledAtAnyTime(t *testing.T) {
	for i := range 6 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			w := &world{dir: t.TempDir()}
			for range 12 {
				w.runFor(t, 15*time.Millisecond+rand.N(120*time.Millisecond))
			}
			w.run(t)
			w.check(t)
		})
	}
}

// runFor runs a daemon for at most the given time.
func (w *world) runFor(t *testing.T, d time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Env = append(os.Environ(), worldVariable+"="+w.dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if out, err := cmd.CombinedOutput(); err != nil && ctx.Err() == nil {
		t.Fatalf("the daemon: %v: %s", err, out)
	}
}

// run runs a daemon with further variables and reports whether it was killed.
func (w *world) run(t *testing.T, variables ...string) (killed bool) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(append(os.Environ(), worldVariable+"="+w.dir, failpoint.Variable+"="), variables...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() && status.Signal() == syscall.SIGKILL {
			return true
		}
	}
	if err != nil {
		t.Fatalf("the daemon: %v: %s", err, out)
	}
	return false
}

func (w *world) check(t *testing.T) {
	t.Helper()
	created := w.lines("created")
	slices.Sort(created)
	created = slices.Compact(created) // a runtime may be killed before there is anything of a module
	if want := []string{"d1", "d2", "m1", "m2", "m3"}; !slices.Equal(created, want) || len(w.lines("twice")) > 0 {
		t.Errorf("created %v, and %v while they ran", created, w.lines("twice"))
	}
	told := w.lines("told")
	slices.Sort(told)
	told = slices.Compact(told)
	want := []string{`d2 {"code":137,"reason":"killed"}`, `m2 {"code":137,"reason":"killed"}`, `m3 {"code":5,"reason":"exited"}`}
	if !slices.Equal(told, want) {
		t.Errorf("told %q, want %q", told, want)
	}
	cleaned := w.lines("cleaned")
	slices.Sort(cleaned)
	cleaned = slices.Compact(cleaned)
	want = []string{`d2 ` + string(status(137, "killed", "")), `m2 ` + string(status(137, "killed", "")),
		`m3 ` + string(status(5, "exited", ""))}
	if !slices.Equal(cleaned, want) {
		t.Errorf("cleaned up after %q, want %q: only after modules that had ended", cleaned, want)
	}
	if got := w.running(); !slices.Equal(got, []string{"d1", "m1"}) {
		t.Errorf("running are %v, want d1 and m1", got)
	}
	s, err := store.Open(filepath.Join(w.dir, "edge", "manager.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var left []string
	for _, kind := range []string{kindModule, kindExit, kindFinished} {
		if err := s.All(kind, func(key string, _ []byte) error { left = append(left, kind+" "+key); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Check(); err != nil || !slices.Equal(left, []string{"module d1", "module m1"}) {
		t.Errorf("the record has %v (%v), want d1 and m1", left, err)
	}
}
