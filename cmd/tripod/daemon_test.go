package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cli"
	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/failpoint"
)

const testImage = "registry.example.com/demo/random:1"

// fakeNode returns the configuration of a node with the fake backends and a registry with one image.
func fakeNode(t *testing.T) *config.Config {
	t.Helper()
	failpoint.Needed(t)
	dir := t.TempDir()
	c := config.Default()
	c.Root, c.State = filepath.Join(dir, "root"), filepath.Join(dir, "state")
	c.Backends.Linux, c.Backends.Fake, c.Node.DefaultHandler = false, true, "fake"
	c.Network.ConfDir = filepath.Join(dir, "net.d")
	c.NRI.Socket = filepath.Join(c.State, "nri.sock")
	c.Image.HostsDirs = []string{serveImage(t, dir)}
	if err := c.Complete(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // separate mount points
		for _, dir := range []string{c.Network.NetnsDir, c.State} {
			_ = unix.Unmount(dir, unix.MNT_DETACH)
		}
	})
	return c
}

func serveImage(t *testing.T, dir string) (hosts string) {
	t.Helper()
	server := httptest.NewServer(registry.New(registry.Logger(log.New(&bytes.Buffer{}, "", 0))))
	t.Cleanup(server.Close)
	image, err := random.Image(1000, 1)
	if err != nil {
		t.Fatal(err)
	}
	tag, err := name.NewTag(strings.TrimPrefix(server.URL, "http://") + "/demo/random:1")
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(tag, image); err != nil {
		t.Fatal(err)
	}
	hosts = filepath.Join(dir, "certs.d")
	if err := os.MkdirAll(filepath.Join(hosts, "_default"), 0o755); err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("[host.%q]\ncapabilities = [\"pull\", \"resolve\"]\n", server.URL)
	if err := os.WriteFile(filepath.Join(hosts, "_default", "hosts.toml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return hosts
}

// start runs a daemon in this process and returns a function that stops it and returns its result.
func start(t *testing.T, c *config.Config) (stop func() error) {
	t.Helper()
	return startUntil(t, c, "info") // its exit code says whether the node is ready
}

// startUntil is like start, but waits until the given client command succeeds.
func startUntil(t *testing.T, c *config.Config, command string) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- runDaemon(ctx, c, quiet) }()
	stop = func() error { cancel(); return <-ended }
	deadline := time.Now().Add(20 * time.Second)
	for {
		if code, _, _ := tripod(c, "", command); code == 0 {
			return stop
		}
		select {
		case err := <-ended:
			t.Fatalf("the daemon ended: %v", err)
		case <-time.After(10 * time.Millisecond): // the only sign is that it answers
		}
		if time.Now().After(deadline) {
			t.Fatal("the daemon does not answer")
		}
	}
}

// tripod runs a client command against the node.
func tripod(c *config.Config, stdin string, args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	args = append(args[:1:1], append([]string{"--endpoint=" + c.GRPC.Socket}, args[1:]...)...)
	code = run(args, strings.NewReader(stdin), &out, &errs)
	return code, out.String(), errs.String()
}

// must runs a client command that must succeed.
func must(t *testing.T, c *config.Config, args ...string) string {
	t.Helper()
	code, stdout, stderr := tripod(c, "", args...)
	if code != 0 {
		t.Fatalf("tripod %s: exit code %d: %s", strings.Join(args, " "), code, stderr)
	}
	return strings.TrimSpace(stdout)
}

// fails runs a client command that must fail with this code and these words on standard error.
func fails(t *testing.T, c *config.Config, code int, words string, args ...string) {
	t.Helper()
	got, _, stderr := tripod(c, "", args...)
	if got != code || !strings.Contains(stderr, words) {
		t.Errorf("tripod %s: exit code %d: %q; want %d and %q", strings.Join(args, " "), got, stderr, code, words)
	}
	if strings.Contains(stderr, "rpc error") {
		t.Errorf("tripod %s: gRPC noise: %q", strings.Join(args, " "), stderr)
	}
}

func TestCommandsAgainstADaemon(t *testing.T) {
	c := fakeNode(t)
	stop := start(t, c)
	if id := must(t, c, "pull", testImage); !strings.HasPrefix(id, "sha256:") {
		t.Errorf("pull printed %q", id)
	}
	if out := must(t, c, "images", "-o", "wide"); !strings.Contains(out, "registry.example.com/demo/random   1 ") {
		t.Errorf("images: %s", out)
	}
	container := must(t, c, "run", testImage, "--host-network", "--name", "one", "--log-dir", t.TempDir(), "-e", "KEY=a value")
	pod := must(t, c, "pods", "-q")
	if out := must(t, c, "ps"); !strings.Contains(out, container[:13]) || !strings.Contains(out, pod[:13]) ||
		!strings.Contains(out, "Running") {
		t.Errorf("ps: %s", out)
	}
	for _, arg := range []string{container, container[:7], "one"} {
		if out := must(t, c, "exec", arg, "echo", "-n", "hello"); out != "-n hello" {
			t.Errorf("exec by %q: %q", arg, out)
		}
	}
	if code, out, _ := tripod(c, "in and out", "exec", "-i", "one", "cat"); code != 0 || out != "in and out" {
		t.Errorf("exec -i cat: %d, %q", code, out)
	}
	fails(t, c, 42, "", "exec", "one", "exit", "42")
	fails(t, c, 42, "", "exec", "-s", "one", "exit", "42")
	fails(t, c, 1, "", "exec", "-s", "one", "exit", "1")
	if code, out, _ := tripod(c, "", "exec", "--transport=websocket", "one", "echo", "ws"); code != 0 || out != "ws\n" {
		t.Errorf("exec over WebSocket: %d, %q", code, out)
	}
	testReading(t, c, container, pod)
	testCompletion(t, c, pod)
	testRemoval(t, c)
	if err := stop(); err != nil {
		t.Errorf("the daemon ended with %v", err)
	}
	fails(t, c, 1, "tripod daemon", "ps")
}

// testReading prints the only pod and its container in every format.
func testReading(t *testing.T, c *config.Config, container, pod string) {
	t.Helper()
	var list struct{ Containers []struct{ ID, State string } }
	if err := json.Unmarshal([]byte(must(t, c, "ps", "-o", "json")), &list); err != nil || len(list.Containers) != 1 ||
		list.Containers[0].ID != container || list.Containers[0].State != "CONTAINER_RUNNING" {
		t.Errorf("ps -o json: %+v, %v", list, err)
	}
	if out := must(t, c, "pods", "-o", "yaml"); !strings.Contains(out, "id: "+pod) {
		t.Errorf("pods -o yaml: %s", out)
	}
	out := must(t, c, "inspect", "one")
	if status := strings.Index(out, `"status"`); status < 0 || strings.Index(out, `"info"`) < status || !strings.Contains(out, container) {
		t.Errorf("inspect: %s", out)
	}
	if out := must(t, c, "inspecti", testImage); !strings.Contains(out, `"repoTags"`) {
		t.Errorf("inspecti: %s", out)
	}
	must(t, c, "inspectp", "one", "-o", "yaml")
	must(t, c, "stats")
	must(t, c, "stats", "--pods", "-o", "json")
	if out := must(t, c, "events"); !strings.HasPrefix(out, "TIME") || !regexp.MustCompile(`started +default/one`).MatchString(out) {
		t.Errorf("events: %s", out)
	}
	if out := must(t, c, "events", "-o", "wide"); !strings.Contains(out, pod) || !strings.Contains(out, container) {
		t.Errorf("events -o wide: %s", out)
	}
	if out := must(t, c, "pull", testImage, "-o", "yaml"); !strings.Contains(out, "repoDigests:\n- registry.example.com/demo/random@sha256:") {
		t.Errorf("pull -o yaml: %s", out)
	}
	if out := must(t, c, "pull", testImage, "-o", "wide"); !strings.Contains(out, "registry.example.com/demo/random   1 ") {
		t.Errorf("pull -o wide: %s", out)
	}
	fails(t, c, 1, `no container has the ID or the name "two"`, "inspect", "two")
	fails(t, c, 1, "is not created, running", "ps", "--state", "happy")
	fails(t, c, 1, "output format", "ps", "-o", "xml")
	fails(t, c, 1, "unknown flag", "ps", "--no-such-flag")
}

// testCompletion completes arguments and flags with what is on the node.
func testCompletion(t *testing.T, c *config.Config, pod string) {
	t.Helper()
	t.Setenv(cli.EndpointVariable, c.GRPC.Socket)
	for _, test := range []struct{ want, args string }{
		{testImage, "rmi"}, {testImage, "run"}, {testImage, "inspecti"}, {testImage, "ps --image"},
		{"default", "pods --namespace"}, {pod[:13], "ps --pod"}, {pod[:13], "stopp"}, {"fake", "run -r"}, {"wide", "pull -o"},
	} {
		var out bytes.Buffer
		args := append([]string{"__complete"}, append(strings.Fields(test.args), "")...)
		if code := run(args, strings.NewReader(""), &out, io.Discard); code != 0 || !strings.Contains(out.String(), test.want) {
			t.Errorf("completion of %s: exit code %d, got %q, want %s", test.args, code, out.String(), test.want)
		}
	}
}

func testRemoval(t *testing.T, c *config.Config) {
	t.Helper()
	fails(t, c, 1, "running; stop it first", "rm", "one")
	fails(t, c, 1, "stop it first", "rmp", "one")
	must(t, c, "stop", "--grace=0", "one")
	if out := must(t, c, "ps"); strings.Contains(out, "one") {
		t.Errorf("ps shows what does not run: %s", out)
	}
	if out := must(t, c, "ps", "-a", "-o", "wide"); !strings.Contains(out, "Exited") {
		t.Errorf("ps -a: %s", out)
	}
	must(t, c, "rm", "one")
	must(t, c, "stopp", "one")
	must(t, c, "rmp", "one")
	must(t, c, "rmi", testImage)
	if left := must(t, c, "pods", "-q") + must(t, c, "ps", "-aq") + must(t, c, "images", "-q"); left != "" {
		t.Errorf("left: %s", left)
	}
	fails(t, c, 1, "1 of 1 failed", "rmp", "one")
	fails(t, c, 1, "at least one ID", "rmp")
}

// TestStopEndsEventStreams checks that a client that follows events does not block the daemon's end, and that the next
// start finds the pods.
func TestStopEndsEventStreams(t *testing.T) {
	c := fakeNode(t)
	stop := start(t, c)
	conn, err := grpc.NewClient("unix://"+c.GRPC.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	events, err := runtimeapi.NewRuntimeServiceClient(conn).GetContainerEvents(t.Context(), &runtimeapi.GetEventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	heard, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		_, err := events.Recv()
		close(heard)
		for ; err == nil; _, err = events.Recv() {
		}
		ended <- err
	}()
	// Events before the subscription are not delivered, so make pods until one is.
	for i, waiting := 0, true; waiting; i++ {
		must(t, c, "run", testImage, "--host-network", "--name", fmt.Sprint("pod-", i), "--log-dir", t.TempDir())
		select {
		case <-heard:
			waiting = false
		case <-time.After(50 * time.Millisecond):
		}
	}
	began := time.Now()
	if err := stop(); err != nil || time.Since(began) > drainTime/2 {
		t.Errorf("the daemon ended with %v after %s", err, time.Since(began))
	}
	if err := <-ended; status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "the daemon is stopping") {
		t.Errorf("the stream of events ended with %v", err)
	}
	stop = start(t, c)
	if out := must(t, c, "ps"); !strings.Contains(out, "pod-0") {
		t.Errorf("after the restart: %s", out)
	}
	soon, cancel := context.WithTimeout(t.Context(), 2*lockInterval)
	defer cancel()
	if err := runDaemon(soon, c, quiet); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("a second daemon on the same directories: %v", err)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// TestLostRecordN7 removes the root directory, as if its disk were not mounted.
func TestLostRecordN7(t *testing.T) {
	c := fakeNode(t)
	stop := start(t, c)
	must(t, c, "run", testImage, "--host-network", "--name", "one", "--log-dir", t.TempDir())
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(c.Root, c.Root+".away"); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the refusal must not create the file that would let the second attempt pass
		if err := runDaemon(t.Context(), c, quiet); !errors.Is(err, errRecordGone) {
			t.Fatalf("started without its record: %v", err)
		}
	}
	if err := errors.Join(os.RemoveAll(c.Root), os.Rename(c.Root+".away", c.Root)); err != nil {
		t.Fatal(err)
	}
	stop = start(t, c)
	if out := must(t, c, "ps"); !strings.Contains(out, "one") {
		t.Errorf("with the disk back: %s", out)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// TestN11RecordThatIsNotThisNodes: an empty record, a truncated one and another node's are refused with a remedy; the
// pods keep running, and are found when the right record is back.
func TestN11RecordThatIsNotThisNodes(t *testing.T) {
	other := fakeNode(t)
	if err := start(t, other)(); err != nil {
		t.Fatal(err)
	}
	foreign, err := os.ReadFile(recordFile(other))
	if err != nil {
		t.Fatal(err)
	}
	c := fakeNode(t)
	stop := start(t, c)
	must(t, c, "run", testImage, "--host-network", "--name", "one", "--log-dir", t.TempDir())
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	right, err := os.ReadFile(recordFile(c))
	if err != nil {
		t.Fatal(err)
	}
	for name, record := range map[string][]byte{"empty": {}, "cut off": right[:3*os.Getpagesize()], "another node's": foreign} {
		for range 2 { // the refusal must not create what would let the second attempt pass
			if err := os.WriteFile(recordFile(c), record, 0o600); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			err := runDaemon(ctx, c, quiet)
			cancel()
			if err == nil || !strings.Contains(err.Error(), "nothing was changed") {
				t.Fatalf("a record that is %s: the daemon ended with %v, want a refusal", name, err)
			}
		}
	}
	if err := os.WriteFile(recordFile(c), right, 0o600); err != nil {
		t.Fatal(err)
	}
	stop = start(t, c)
	if out := must(t, c, "ps"); !strings.Contains(out, "one") || !strings.Contains(out, "Running") {
		t.Errorf("with the record back: %s", out)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

func TestDamagedRecordIsLeftAlone(t *testing.T) {
	c := fakeNode(t)
	if err := os.MkdirAll(c.Root, 0o700); err != nil {
		t.Fatal(err)
	}
	damaged := bytes.Repeat([]byte("not a database\n"), 4096)
	if err := os.WriteFile(recordFile(c), damaged, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := runDaemon(t.Context(), c, quiet); err == nil || !strings.Contains(err.Error(), "record.db") {
		t.Errorf("started with a damaged record: %v", err)
	}
	if text, err := os.ReadFile(recordFile(c)); err != nil || !bytes.Equal(text, damaged) {
		t.Errorf("the damaged record was changed: %v", err)
	}
}

// TestDiag checks that the output has every section, with the daemon up and down, and no secrets.
func TestDiag(t *testing.T) {
	c := fakeNode(t)
	stop := start(t, c)
	must(t, c, "run", testImage, "--host-network", "--name", "one", "--log-dir", t.TempDir(), "-e", "PASSWORD=hush")
	sections := gather(t.Context(), c)
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	for up, sections := range map[bool][]section{true: sections, false: gather(t.Context(), c)} {
		text := map[string]string{}
		for _, s := range sections {
			text[s.name] = string(s.text)
			if strings.Contains(text[s.name], "hush") || strings.Contains(text[s.name], "aHVzaA==") {
				t.Errorf("%s tells a secret", s.name)
			}
		}
		if !strings.Contains(text["record.txt"], "fsck: intact") ||
			!strings.Contains(text["record.txt"], `"hostname": "one"`) && !strings.Contains(text["record.txt"], `"name": "one"`) {
			t.Errorf("record.txt: %s", text["record.txt"])
		}
		if got := strings.Contains(text["cri.json"], `"RuntimeReady"`); got != up {
			t.Errorf("with the daemon up=%v, cri.json: %.300s", up, text["cri.json"])
		}
	}
}
