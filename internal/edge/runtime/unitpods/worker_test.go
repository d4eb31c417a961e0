package unitpods

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/node/store"
	"github.com/tripod-run/tripod/internal/sandbox"
	backend "github.com/tripod-run/tripod/internal/sandbox/wasm"
	"github.com/tripod-run/tripod/test/fake"
	"github.com/tripod-run/tripod/test/harness/testns"
)

// testGuests are binaries that do what their first argument says; their sources are beside them.
const testGuests = "../../../component/engine/testdata"

// whole is a rig with nothing faked but the pods' network: the image store, the backend for components and its workers
// are the real ones. It needs root, and is for hack/testns.sh.
type whole struct {
	*rig
	images  *image.Store
	backend *backend.Backend
	program string
}

// programs is where the worker is built, once for all tests.
var programs string

func TestMain(m *testing.M) {
	code := m.Run()
	if programs != "" {
		_ = os.RemoveAll(programs)
	}
	os.Exit(code)
}

var buildWorker = sync.OnceValues(func() (program string, err error) {
	if programs, err = os.MkdirTemp("", "edge-worker-"); err != nil {
		return "", err
	}
	if err := os.Chmod(programs, 0o755); err != nil { // for the worker, who is nobody
		return "", err
	}
	program = filepath.Join(programs, backend.ProgramName)
	build := exec.Command("go", "build", "-o", program, "github.com/tripod-run/tripod/cmd/tripod-wasm")
	build.Env = append(os.Environ(), "CGO_ENABLED=1")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the worker: %w\n%s", err, out)
	}
	return program, nil
})

// noPorts is a network without sockets: commands have none.
type noPorts struct{}

func (noPorts) Listen(context.Context, string, string, string) (*os.File, error) {
	return nil, errdefs.ErrNotImplemented
}

func newWhole(t testing.TB) *whole {
	t.Helper()
	dir, err := os.MkdirTemp("", "edge-wasm-") // not t.TempDir: workers, who are nobody, have sockets there
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	w := &whole{rig: &rig{TB: t, dir: dir, modules: filepath.Join(dir, "modules")}}
	w.must(os.Chmod(dir, 0o755))
	w.program, err = buildWorker()
	w.must(err)
	w.must(os.Mkdir(w.modules, 0o755))
	for _, name := range []string{"command.wasm", "channels.wasm"} {
		raw, err := os.ReadFile(filepath.Join(testGuests, name))
		w.must(err)
		w.must(os.WriteFile(filepath.Join(w.modules, name), raw, 0o644))
	}
	w.config = Config{
		Name: "wasm", UUID: "11111111-0000-4000-8000-000000000001", LogDir: filepath.Join(dir, "logs"),
		ModuleRoots: []string{w.modules}, DirRoots: []string{filepath.Join(dir, "data")}, Topics: wire.Topics{Realm: "realm"},
		Logger: slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
	w.open()
	t.Cleanup(func() {
		for _, p := range w.node.Pods() {
			w.must(w.removePod(context.Background(), p.ID))
		}
		w.close()
	})
	return w
}

// open starts a daemon; after close, the next one.
func (w *whole) open() {
	w.Helper()
	ctx := w.Context()
	var err error
	w.images, err = image.Open(ctx, image.Config{Root: filepath.Join(w.dir, "images"), Logger: w.config.Logger})
	w.must(err)
	w.backend, err = backend.Open(ctx, backend.Config{
		Root: filepath.Join(w.dir, "wasm"), RunDir: filepath.Join(w.dir, "run"), Program: w.program, UID: 65529, GID: 65529,
		CgroupDriver: "cgroupfs",
		CgroupParent: fmt.Sprintf("%s/tripod-edge-test-%d", testns.Cgroup(), os.Getpid()), LabelPrefix: "vimana.host/",
	}, backend.Services{Images: backend.Images{Store: w.images}, Network: noPorts{}, Logger: w.config.Logger})
	w.must(err)
	w.store, err = store.Open(filepath.Join(w.dir, "node.db"))
	w.must(err)
	network := &fake.Network{Dir: filepath.Join(w.dir, "network")}
	w.must(os.MkdirAll(network.Dir, 0o700))
	w.node, err = node.Open(ctx, node.Config{
		Store: w.store, Backends: map[string]sandbox.Backend{"wasm": w.backend}, DefaultHandler: "wasm", Network: network, Images: w.images,
		Logger: w.config.Logger,
	})
	w.must(err)
	w.config.Node, w.config.Images = w.node, backend.Images{Store: w.images}
	w.Runtime, err = New(w.config)
	w.must(err)
	_, err = w.Start(ctx)
	w.must(err)
}

func (w *whole) close() {
	w.rig.close()
	_ = w.backend.Close()
	_ = w.images.Close()
}

// run creates a module of one of the test's guests.
func (w *whole) run(index int, uuid, file, args string, more ...string) {
	w.Helper()
	w.create(index, uuid, append([]string{`"file":"` + file + `"`, `"args":["guest",` + args + `]`}, more...)...)
}

// TestRealWorker runs modules in tripod-wasm, and checks their exits, output and directories.
func TestRealWorker(t *testing.T) {
	w := newWhole(t)
	data := filepath.Join(w.dir, "data")
	w.must(os.Mkdir(data, 0o777))
	w.must(os.Chmod(data, 0o777))
	for i, c := range []struct {
		args, more string
		log        string
		code       int32
		reason     string
	}{
		{`"env","NAME"`, `"env":["NAME=value"]`, "guest value", 0, "exited"},
		{`"exit","7"`, `"name":"seven"`, "", 7, "exited"},
		{`"abort"`, `"name":"abort"`, "", 134, "trap"},
		{`"eat"`, `"resources":{"memory":"8Mi"}`, "", 137, "oom"},
		{`"spin"`, `"resources":{"deadline":0.3}`, "", 137, "deadline"},
		{`"write","/data/file","written"`, `"dirs":["` + data + `::/data"]`, "", 0, "exited"},
		{`"read","/data/file"`, `"dirs":["` + data + `::/data"]`, "written", 0, "exited"},
	} {
		uuid := fmt.Sprintf("module-%d", i)
		w.run(i, uuid, "command.wasm", c.args, c.more)
		var lines []string
		for {
			m := w.receive()
			if m.Arg == wire.ModuleLog {
				lines = append(lines, string(m.Payload))
				continue
			}
			want := fmt.Sprintf(`{"status":{"code":%d,"reason":%q,`, c.code, c.reason)
			if !strings.HasPrefix(string(m.Payload), want) || m.Module != i || !strings.Contains(strings.Join(lines, "\n"), c.log) {
				t.Errorf("%s: log %q, end %s, want %q, %s", c.args, lines, m.Payload, c.log, want)
			}
			break
		}
		w.cleanup(i, uuid)
	}
	if n := len(w.node.Pods()); n != 0 {
		t.Errorf("%d pods are left, want 0", n)
	}
}

// TestRealChannels: a guest's messages have its index, messages to it arrive, the next daemon resumes it, and its exit
// after a delete is reported after its last message.
func TestRealChannels(t *testing.T) {
	w := newWhole(t)
	w.run(3, uuid, "channels.wasm", `"echo","/ch/io"`, `"channels":[{"name":"io","mode":"rw","topic":"$SL/io"}]`)
	pod := w.pod(uuid).ID
	for round := range 2 {
		m := w.receive()
		o, err := channel.ParseOpen(m.Payload)
		if m.Arg != channel.OpenChannel || m.Module != 3 || err != nil || o.Topic != "realm/io/"+uuid || o.Flags != channel.Read|channel.Write {
			t.Fatalf("message %+v, %+v, %v", m, o, err)
		}
		if w.Group(3) == "" {
			t.Error("no group")
		}
		for i := range 100 {
			text := fmt.Sprintf("message %d of round %d", i, round)
			w.must(w.Send(t.Context(), channel.Message{Header: channel.Header{Module: 3, Arg: o.FD}, Payload: []byte(text)}))
			if m := w.receive(); m.Control || m.Module != 3 || m.Arg != o.FD || string(m.Payload) != text {
				t.Fatalf("message %+v %q", m.Header, m.Payload)
			}
		}
		if round == 0 {
			w.close()
			w.open()
			if ok, err := w.Adopt(t.Context(), 3, w.data(uuid)); !ok || err != nil {
				t.Fatalf("Adopt returned %v, %v, want true without an error", ok, err)
			}
		}
	}
	if got := w.pod(uuid); got.ID != pod || got.Container(pod).State != node.Running {
		t.Errorf("the pod is %s, not %s", got.ID, pod)
	}
	w.must(w.Delete(t.Context(), 3, uuid))
	if m := w.receive(); m.Arg != channel.CloseChannel {
		t.Errorf("received %+v, want a message of type CloseChannel", m)
	}
	if e := w.wantExited(3, 0, "killed"); e.Message == "" { // the end of its channel was its end
		t.Error("the end has no message")
	}
}

// TestRealBadModule: the worker's compiler refuses a bad module, which leaves nothing behind.
func TestRealBadModule(t *testing.T) {
	w := newWhole(t)
	w.must(os.WriteFile(filepath.Join(w.modules, "m.wasm"), emptyModule, 0o644))
	if err := w.Create(t.Context(), 0, w.data(uuid)); !errdefs.IsInvalidArgument(err) {
		t.Errorf("Create of an empty module returned %v, want InvalidArgument", err)
	}
	if n := len(w.node.Pods()); n != 0 {
		t.Errorf("%d pods are left, want 0", n)
	}
}

// TestCreateIsFast logs the median time from create to running with a warm cache, which should be below 5 ms. The test
// allows for other load on the machine.
func TestCreateIsFast(t *testing.T) {
	w := newWhole(t)
	const modules = channel.MaxModules
	took := make([]time.Duration, 0, modules)
	for i := range modules {
		uuid := fmt.Sprintf("module-%d", i)
		data := w.data(uuid, `"file":"command.wasm"`, `"args":["guest","sleep","1000"]`)
		begin := time.Now()
		w.must(w.Create(t.Context(), i, data))
		took = append(took, time.Since(begin))
	}
	if n := len(w.node.Pods()); n != modules {
		t.Errorf("%d pods, want %d", n, modules)
	}
	compiles := took[0]
	took = took[1:]
	sort.Slice(took, func(i, j int) bool { return took[i] < took[j] })
	t.Logf("create → running, %d modules on one runtime: p50 %v, p99 %v, most %v", modules, took[len(took)/2], took[len(took)*99/100],
		slices.Max(took))
	if p50 := took[len(took)/2]; p50 > compiles/2 {
		t.Errorf("p50 %v, want less than half of what the first took, %v, because only that compiles", p50, compiles)
	}
}
