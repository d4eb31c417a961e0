package soak

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/quic-go/quic-go/http3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/test/harness"
)

// component is a component that a unit pod can run.
type component struct {
	image string
	args  []string
	// end is the exit code and reason of a component that ends by itself, and lines is the number of its last line.
	end   string
	lines int
	// ask calls the component. It returns an error if the call fails or the answer is wrong.
	ask func(*unit, context.Context) error
}

var components = map[string]component{
	"greeter":  {image: harness.GreeterC, ask: (*unit).askGreeter},
	"faults":   {image: harness.FaultsC, ask: (*unit).askFaults},
	"hello":    {image: harness.HelloHTTP, ask: (*unit).askHello},
	"sleeper":  {image: harness.CommandGo, args: []string{"out", "line 1", "sleep", "1h"}},
	"spinner":  {image: harness.CommandGo, args: []string{"out", "line 1", "spin"}},
	"quitter":  {image: harness.CommandGo, args: []string{"out", "line 1", "out", "line 2", "exit", "3"}, end: "3 Error", lines: 2},
	"finisher": {image: harness.CommandGo, args: manyLines(300), end: "0 Completed", lines: 300},
}

var componentNames = []string{"greeter", "greeter", "faults", "faults", "hello", "sleeper", "spinner", "quitter", "finisher"}

func manyLines(n int) (args []string) {
	for i := range n {
		args = append(args, "out", fmt.Sprintf("line %d", i+1))
	}
	return args
}

// raw is a codec for messages that are already encoded.
type raw struct{}

func (raw) Marshal(v any) ([]byte, error)      { return v.([]byte), nil }
func (raw) Unmarshal(data []byte, v any) error { *v.(*[]byte) = bytes.Clone(data); return nil }
func (raw) Name() string                       { return "proto" }

// invoke makes a unary gRPC call.
func (u *unit) invoke(ctx context.Context, method string, request []byte) (reply []byte, err error) {
	conn, err := grpc.NewClient("passthrough:///"+net.JoinHostPort(u.ip, "80"),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.ForceCodec(raw{})))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	err = conn.Invoke(ctx, "/"+method, request, &reply)
	return reply, err
}

// fetch makes a request over HTTP/3, or over cleartext HTTP/1.1.
func (u *unit) fetch(ctx context.Context, path, contentType string, body []byte) ([]byte, error) {
	url, method := "http://"+u.ip+path, http.MethodGet
	transport := http.RoundTripper(&http.Transport{DisableKeepAlives: true})
	if u.rng.IntN(2) == 0 {
		overQUIC := &http3.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
		defer overQUIC.Close()
		url, transport = "https://"+u.ip+path, overQUIC
	}
	if body != nil {
		method = http.MethodPost
	}
	r, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if contentType != "" {
		r.Header.Set("Content-Type", contentType)
	}
	resp, err := transport.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, got)
	}
	return got, err
}

func (u *unit) askGreeter(ctx context.Context) error {
	const method, request = "greet.v1.Greeter/SayHello", "\x0a\x03Ada"
	call := u.invoke
	if u.rng.IntN(2) == 0 {
		call = func(ctx context.Context, method string, request []byte) ([]byte, error) {
			return u.fetch(ctx, "/"+method, "application/proto", request) // Connect's protocol
		}
	}
	got, err := call(ctx, method, []byte(request))
	if err == nil && !strings.Contains(string(got), "Hello, Ada!") {
		err = fmt.Errorf("answer of the greeter: got %q, want a greeting of Ada", got)
	}
	return err
}

func (u *unit) askHello(ctx context.Context) error {
	got, err := u.fetch(ctx, "/here", "", nil)
	if err == nil && !strings.Contains(string(got), "hello from /here") {
		err = fmt.Errorf("answer: got %q, want %q", got, "hello from /here")
	}
	return err
}

// askFaults makes the guest answer, fail or print a line.
func (u *unit) askFaults(ctx context.Context) error {
	const service = "faults.v1.Faults/"
	failing := []struct {
		method, request string
		code            codes.Code
	}{
		{"Trap", "", codes.Internal}, {"Recurse", "", codes.Internal}, {"Exit", "\x08\x03", codes.Internal},
		{"Allocate", "\x08\x80\xa8\xd6\xb9\x07", codes.ResourceExhausted}, {"Echo", "\x0a\xff", codes.InvalidArgument},
	}
	switch u.rng.IntN(4) {
	case 0:
		x := pick(u.rng, failing)
		_, err := u.invoke(ctx, service+x.method, []byte(x.request))
		if err := wantStatus(err, x.code); err != nil {
			return fmt.Errorf("%s: %w", x.method, err)
		}
		return nil
	case 1:
		line := fmt.Sprintf("line %d", u.c.printed+1)
		_, err := u.invoke(ctx, service+"Print", append([]byte{0x0a, byte(len(line))}, line...))
		if err == nil {
			u.c.printed++
		}
		return err
	case 2:
		_, err := u.invoke(ctx, service+"Spin", []byte("\x08\x32")) // 50 ms
		return err
	default:
		const message = "\x0a\x02hi"
		got, err := u.invoke(ctx, service+"Echo", []byte(message))
		if err == nil && string(got) != message {
			err = fmt.Errorf("echo: got %q, want %q", got, message)
		}
		return err
	}
}

// wasmWorkers returns the daemon's worker processes, according to its files.
func (s *soak) wasmWorkers() (found []process.ID) {
	files, _ := filepath.Glob(filepath.Join(s.d.State, "wasm", "workers", "*", "worker.json"))
	for _, file := range files {
		var record struct{ Process process.ID }
		text, err := os.ReadFile(file)
		if err == nil && json.Unmarshal(text, &record) == nil && record.Process.Pid > 0 {
			found = append(found, record.Process)
		}
	}
	return found
}

// killWasmWorkers kills a process that runs components, at random times.
func (s *soak) killWasmWorkers(rng *rand.Rand, stop <-chan struct{}) {
	for {
		select {
		case <-stop:
			return
		case <-time.After(time.Duration(rng.Int64N(int64(6 * time.Second)))):
		}
		s.killWasmWorker(rng)
	}
}

// killWasmWorker kills a random process that runs components, if one exists.
func (s *soak) killWasmWorker(rng *rand.Rand) {
	alive := s.wasmWorkers()
	if len(alive) == 0 {
		return
	}
	p, err := process.Adopt(pick(rng, alive))
	if err != nil {
		return // the process has ended
	}
	defer p.Close()
	s.deathCount.Add(1) // from here on the worker may be dead
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := errors.Join(p.Signal(syscall.SIGKILL), p.Wait(ctx)); err != nil {
		s.t.Errorf("kill wasm worker %d: %v", p.Pid, err)
	}
	s.deathCount.Add(1) // the worker is dead: components that start from here on run in another
}

// usage is the resource usage of a process.
type usage struct{ files, threads, residentKiB int }

func (a usage) String() string {
	return fmt.Sprintf("%d files, %d threads, %d KiB", a.files, a.threads, a.residentKiB)
}

// usageOf returns the usage of a process. ok is false if the process has ended.
func usageOf(pid int) (u usage, ok bool) {
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	text, err2 := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if errors.Join(err, err2) != nil {
		return u, false
	}
	u.files = len(files)
	for line := range strings.Lines(string(text)) {
		switch f := strings.Fields(line); {
		case len(f) < 2:
		case f[0] == "VmRSS:":
			u.residentKiB, _ = strconv.Atoi(f[1])
		case f[0] == "Threads:":
			u.threads, _ = strconv.Atoi(f[1])
		}
	}
	return u, true
}

// workerGrowth returns an error if a worker's usage has grown since the last moment without pods.
func (s *soak) workerGrowth() error {
	var errs []error
	for id, before := range s.workerBase {
		now, ok := usageOf(id.Pid)
		if start, err := process.StartTime(id.Pid); !ok || err != nil || start != id.Start {
			continue
		}
		if now.files > before.files+5 || now.threads > before.threads+16 || now.residentKiB > before.residentKiB+moreKiB {
			errs = append(errs, fmt.Errorf("usage of wasm worker %d without pods: got %v, was %v", id.Pid, now, before))
		}
	}
	return errors.Join(errs...)
}

// snapshot returns the node's resources, without the shared component worker, which another may replace.
func (s *soak) snapshot() harness.Resources {
	r := harness.Snapshot(s.d)
	for _, found := range []map[string]int{r.Processes, r.Cgroups} {
		maps.DeleteFunc(found, func(name string, _ int) bool {
			return strings.Contains(name, "/tripod-wasm worker ") || strings.Contains(name, "/tripod-wasm-node.")
		})
	}
	return r
}

// useComponents removes and pulls all images of components, and runs a pod, so that a worker exists for later pods.
func (s *soak) useComponents() {
	if len(s.units) == 0 {
		return
	}
	for _, c := range components {
		spec := &runtimeapi.ImageSpec{Image: c.image}
		_, err := s.img.RemoveImage(s.t.Context(), &runtimeapi.RemoveImageRequest{Image: spec})
		if err == nil {
			_, err = s.img.PullImage(s.t.Context(), &runtimeapi.PullImageRequest{Image: spec})
		}
		if err != nil {
			s.t.Errorf("remove and pull %s again: %v", c.image, err)
		}
	}
	for _, call := range []node.Call{node.RunPodSandbox, node.CreateContainer, node.StartContainer, node.RemovePodSandbox} {
		s.units[0].order(call)
	}
	s.workerBase = map[process.ID]usage{}
	for _, id := range s.wasmWorkers() {
		if u, ok := usageOf(id.Pid); ok {
			s.workerBase[id] = u
			s.t.Logf("%s wasm worker %d: %v; the daemon: %d KiB", clock(), id.Pid, u, s.residentKiB())
		}
	}
}
