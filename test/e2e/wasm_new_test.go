package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/until"
)

const echoProto = `syntax = "proto3";
package echo.v1;
service Echo {
  rpc Say(Text) returns (Text);
  rpc Stream(Text) returns (stream Text);
  rpc Collect(stream Text) returns (Text);
  rpc Talk(stream Text) returns (stream Text);
}
message Text { string text = 1; int64 id = 2; }
`

const echoCases = `
cases:
- name: says
  method: echo.v1.Echo/Say
  requests: [{text: a, id: 9007199254740993}]
  responses: [{text: a, id: "9007199254740993"}]
- name: streams
  method: echo.v1.Echo/Stream
  requests: [{text: a}]
  responses: [{text: a}]
- name: collects
  method: echo.v1.Echo/Collect
  requests: [{text: a}, {text: b}]
  responses: [{}]
- name: talks
  method: echo.v1.Echo/Talk
  requests: [{text: a}, {text: b}]
  responses: [{text: a}, {text: b}]
`

// componentCommand runs `tripod component` in a directory and returns its output and exit code.
func componentCommand(t *testing.T, dir string, args ...string) (output string, code int) {
	t.Helper()
	return commandIn(t, dir, append([]string{"component"}, args...)...)
}

// commandIn runs `tripod` in a directory and returns its output and exit code.
func commandIn(t *testing.T, dir string, args ...string) (output string, code int) {
	t.Helper()
	tripod, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), tripod, args...)
	c.Dir = dir
	out, err := c.CombinedOutput()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return string(out), exit.ExitCode()
	}
	if err != nil {
		t.Fatalf("%q: %v\n%s", c.Args, err, out)
	}
	return string(out), 0
}

// TestWasmComponentNew: a .proto becomes a server in Go that passes its own cases in a worker, and then runs as a pod.
func TestWasmComponentNew(t *testing.T) {
	newEchoServes(t, "go", "--sdk", filepath.Join(harness.Root(), "sdk", "go"))
}

// TestWasmComponentNewPython is TestWasmComponentNew for a typed server in Python, whose instances begin as they were built. What
// stops a build is said.
func TestWasmComponentNewPython(t *testing.T) {
	templatesOnly(t)
	dir := newEchoServes(t, "python")
	wantRoute(t, dir, "grpc (echo.v1.Echo); core path, in workers that pods share; no snapshots (componentize-py initialized the guest when it was built)")
	breakBuild(t, dir, "server.py", "    def talk", func(text, rest string) map[string]string {
		return map[string]string{"import nowhere\n" + text: "No module named 'nowhere'", rest: "abstract method 'talk'"}
	})
}

// TestWasmPythonServer: examples/wasm/greeter-python goes from its sources to a pod as a clone has them.
func TestWasmPythonServer(t *testing.T) {
	templatesOnly(t)
	usePackages(t, "python")
	dir, sources := filepath.Join(t.TempDir(), "greeter-python"), filepath.Join(harness.Root(), "examples/wasm/greeter-python")
	if err := os.CopyFS(filepath.Join(dir, "proto"), os.DirFS(filepath.Join(sources, "proto"))); err != nil {
		t.Fatal(err)
	}
	// not what an earlier build has left there
	for _, name := range []string{"pyproject.toml", "requirements.txt", "server.py", "tests.yaml"} {
		text, err := os.ReadFile(filepath.Join(sources, name))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), text, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if out, code := componentCommand(t, dir, "test"); code != 0 || !strings.HasSuffix(out, "\n5 passed, 0 failed\n") {
		t.Fatalf("component test: exit code %d, output %s", code, out)
	}
	image := pushWasm(t, dir, "pushed/greeter-python:1")
	_, s := startComponent(t, harness.StartDaemon(t, harness.Wasm(t, "node")), image, greeter, env("POD_NAME", "pod-1"))
	s.everyProtocol(`{"message":"Hello, Ada!","servedBy":"pod-1"}`)
	s.metadataAndStatus("1", "2")
}

// wantRoute looks at how `tripod check` says that a node runs the component of a directory.
func wantRoute(t *testing.T, dir, route string) {
	t.Helper()
	if out, code := commandIn(t, dir, "check", "component.wasm", "--proto", "proto/echo.proto"); code != 0 || !strings.Contains(out, route) {
		t.Errorf("check: exit code %d, output %s; want %q", code, out, route)
	}
}

// breakBuild writes the texts of broken, which are made of a file and what it has before its last method, and wants what is said.
func breakBuild(t *testing.T, dir, name, last string, broken func(text, rest string) map[string]string) {
	t.Helper()
	file := filepath.Join(dir, name)
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	rest, _, found := strings.Cut(string(text), last)
	if !found {
		t.Fatalf("%s has no %q:\n%s", name, last, text)
	}
	for text, want := range broken(string(text), rest) {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if out, code := componentCommand(t, dir, "test"); code != 1 || !strings.Contains(out, want) || strings.Contains(out, "Stack backtrace") {
			t.Errorf("component test: exit code %d, output %s; want %q", code, out, want)
		}
	}
}

// TestWasmComponentNewC is TestWasmComponentNew for a typed server in C. What stops a build is said.
func TestWasmComponentNewC(t *testing.T) {
	templatesOnly(t)
	dir := newEchoServes(t, "c")
	wantRoute(t, dir, "grpc (echo.v1.Echo); core path, in workers that pods share")
	breakBuild(t, dir, "server.c", "bool exports_proto_echo_v1_echo_talk", func(text, rest string) map[string]string {
		return map[string]string{text + "int x = nowhere;\n": "undeclared identifier 'nowhere'",
			rest: "undefined symbol: exports_proto_echo_v1_echo_talk"}
	})
}

// TestWasmComponentNewRust is TestWasmComponentNew for a typed server in Rust. What stops a build is said.
func TestWasmComponentNewRust(t *testing.T) {
	templatesOnly(t)
	dir := newEchoServes(t, "rust")
	wantRoute(t, dir, "grpc (echo.v1.Echo); core path, in workers that pods share")
	breakBuild(t, dir, "src/lib.rs", "    fn talk(", func(text, rest string) map[string]string {
		return map[string]string{text + "fn x() -> i32 { nowhere }\n": "cannot find value `nowhere`", rest + "}\n": "missing: `talk`"}
	})
}

// newEchoServes makes a server of echoProto, which must pass echoCases and answer as a pod.
func newEchoServes(t *testing.T, lang string, more ...string) (dir string) {
	t.Helper()
	usePackages(t, lang)
	dir = filepath.Join(t.TempDir(), "echo")
	proto := dir + ".proto"
	if err := os.WriteFile(proto, []byte(echoProto), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, code := componentCommand(t, filepath.Dir(dir),
		append([]string{"new", "--lang", lang, "echo", "echo.proto"}, more...)...); code != 0 {
		t.Fatalf("component new: exit code %d, output %s", code, out)
	}
	if err := os.WriteFile(filepath.Join(dir, "tests.yaml"), []byte(echoCases), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, code := componentCommand(t, dir, "test"); code != 0 || !strings.HasSuffix(out, "\n4 passed, 0 failed\n") {
		t.Fatalf("component test: exit code %d, output %s", code, out)
	}
	image := pushWasm(t, dir, "pushed/echo-"+lang+":1")
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	c, s := startComponent(t, d, image, "echo.v1.Echo")
	said := func(code string) {
		t.Helper()
		if got := s.call("echo.v1.Echo/Say", `{"text":"a","id":"9007199254740993"}`); got != `{"text":"a","id":"9007199254740993"}` {
			t.Errorf("Say by %s code: got %s, want the request", code, got)
		}
	}
	quick := func() bool {
		t.Helper()
		status, err := d.CRI().ContainerStatus(t.Context(), &runtimeapi.ContainerStatusRequest{ContainerId: c.ID, Verbose: true})
		if err != nil {
			t.Fatal(err)
		}
		return strings.Contains(fmt.Sprint(status.Info), `"quickCode":true`)
	}
	// 20 MB that the node has never seen begin with quick code; 100 kB do not need it.
	if small := lang == "c" || lang == "rust"; quick() == small {
		t.Errorf("the pod began with quick code: got %t, want %t", small, !small)
	}
	said("the first")
	until.Within(t, 2*time.Minute, "the pod runs optimised code", func() bool { return !quick() })
	said("optimised")
	for method, want := range map[string][]string{"Collect": {`{}`}, "Talk": {`{"text":"a"}`, `{"text":"b"}`}} {
		if got, err := s.exchange("echo.v1.Echo/"+method, `{"text":"a"}`, `{"text":"b"}`); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: got %v, error %v; want %v", method, got, err, want)
		}
	}
	if got, err := s.exchange("echo.v1.Echo/Stream", `{"text":"a"}`); err != nil || !slices.Equal(got, []string{`{"text":"a"}`}) {
		t.Errorf("Stream: got %v, error %v", got, err)
	}
	return dir
}

// TestWasmComponentTest: what differs from a case is reported, with the component's output and exit code 1. A case with
// another outcome than it expects never passes.
func TestWasmComponentTest(t *testing.T) {
	examples := filepath.Join(harness.Root(), "examples", "wasm")
	args := []string{"test", "greeter-c/greeter-c.wasm", "--proto", "greeter/greeter.proto", "--tests"}
	run := func(cases string, more ...string) (string, int) {
		t.Helper()
		file := filepath.Join(t.TempDir(), "cases.yaml")
		if err := os.WriteFile(file, []byte("env: {POD_NAME: solo}\ncases:\n"+cases), 0o644); err != nil {
			t.Fatal(err)
		}
		return componentCommand(t, examples, append(append(slices.Clone(args), file), more...)...)
	}
	const (
		hello = "- name: hello\n  method: greet.v1.Greeter/SayHello\n  requests: [{name: Ada}]\n"
		empty = "- name: empty\n  method: greet.v1.Greeter/SayHello\n"
		count = "- name: count\n  method: greet.v1.Greeter/Countdown\n  requests: [{from: 1}]\n"
	)
	good := hello + "  metadata: {x-request-id: r1, x-trace-bin: \"\\x01\"}\n  responses: [{message: \"Hello, Ada!\", servedBy: solo}]\n  header: {x-request-id: r1}\n  trailer: {x-trace-bin: \"\\x01\"}\n" +
		empty + "  code: INVALID_ARGUMENT\n  message: 'name: must not be empty'\n" + count + "  responses: [{number: 1}, {}]\n"
	if out, code := run(good); code != 0 || !strings.HasSuffix(out, "\n3 passed, 0 failed\n") {
		t.Errorf("good cases: exit code %d, output %s", code, out)
	}
	if out, code := run(good, "--run", "^e", "-o", "json"); code != 0 || !strings.Contains(out, `"name": "empty"`) ||
		strings.Contains(out, `"name": "hello"`) {
		t.Errorf("--run ^e: exit code %d, output %s", code, out)
	}
	if out, code := run(good, "--run", "^hello", "--profile"); code != 0 ||
		!strings.Contains(out, "\nhello: where the component is in a call (at ") || !strings.Contains(out, "<wasm function ") {
		t.Errorf("--profile: exit code %d, output %s", code, out)
	}
	for cases, want := range map[string]string{
		hello + "  responses: [{message: Hi}]\n":                        `response 1: got {"message":"Hello, Ada!","servedBy":"solo"}, want {"message":"Hi"}`,
		hello + "  responses: []\n":                                     "want none",
		hello + "  code: NOT_FOUND\n":                                   "want none",
		empty + "  responses: [{}]\n":                                   `status: got InvalidArgument ("name: must not be empty"), want OK`,
		empty + "  code: INVALID_ARGUMENT\n  message: other\n":          `status message: got "name: must not be empty", want "other"`,
		count + "  responses: [{number: 1}]\n":                          "response 2: got {}, want none",
		count + "  responses: [{number: 1}, {}, {}]\n":                  "responses: got 2, want 3",
		count + "  responses: [{number: 1}, {}]\n  header: {x: '1'}\n":  `header x: got [], want "1"`,
		count + "  responses: [{number: 1}, {}]\n  trailer: {x: '1'}\n": `trailer x: got [], want "1"`,
		"- name: slow\n  method: greet.v1.Greeter/Countdown\n  requests: [{from: 1, intervalMs: 60000}]\n  responses: [{number: 1}, {}]\n  timeout: 300ms\n": "status: got DeadlineExceeded",
	} {
		out, code := run(cases)
		if code != 1 || !strings.Contains(out, "FAIL  ") || !strings.Contains(out, want) || !strings.HasSuffix(out, "0 passed, 1 failed\n") {
			t.Errorf("cases %s: exit code %d, output %s; want %q", cases, code, out, want)
		}
	}
	for cases, want := range map[string]string{
		"":                                      "the file has no cases",
		"- name: x\n":                           "cases[0]: name or method is missing",
		hello + "  replies: []\n":               "replies",
		hello + "  code: BAD\n":                 "invalid code",
		hello + "  timeout: fast\n":             `timeout "fast"`,
		hello + "  responses: [{massage: x}]\n": "massage",
		"- name: x\n  method: greet.v1.Greeter/None\n": "no method greet.v1.Greeter/None",
	} {
		if out, code := run(cases); code != 1 || !strings.Contains(out, want) {
			t.Errorf("cases %q: exit code %d, output %s; want %q", cases, code, out, want)
		}
	}
	if out, code := run(good, "--run", "none"); code != 1 || !strings.Contains(out, "--run none matches no case") {
		t.Errorf("--run none: exit code %d, output %s", code, out)
	}
}
