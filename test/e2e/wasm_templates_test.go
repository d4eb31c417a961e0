package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/tripod-run/tripod/test/harness"
)

const cart = "shop.v1.Cart"

// everything has each kind of field, with the integers that a double cannot hold, in protobuf's JSON.
const everything = `{"flag": true, "i32": -2147483648, "s32": -2147483648, "u32": 4294967295, "i64": "-9223372036854775808", "s64": "9007199254740993",
 "u64": "18446744073709551615", "f32": 4294967295, "sf32": -1, "f64": "18446744073709551615", "sf64": "-9007199254740993", "single": -0.5, "double": 1e300,
 "text": "ü€😀\u0000\ufeff", "data": "AP+A", "mood": "MOOD_ODD", "maybe": "0", "note": "", "numbers": ["1", "-9007199254740993", "0"], "words": ["", "a"],
 "adds": [{}, {"name": "x", "amount": "9007199254740993"}], "moods": ["MOOD_HAPPY", 7, -1], "counts": {"a": "9223372036854775807"},
 "byId": {"-9223372036854775808": {"name": "low"}}, "big": "9007199254740993", "at": "2026-11-23T12:00:00.000000001Z", "took": "-1.500s", "wrapped": "9007199254740993",
 "child": {"child": {"none": false}, "word": ""}, "flags": [true, false], "doubles": ["NaN", "-Infinity", -0.0], "fixed": ["18446744073709551615"], "blobs": ["", "/w=="]}`

// templatesOnly skips a test that needs the packages of npm or PyPI, or crates.
func templatesOnly(t *testing.T) {
	if os.Getenv("TRIPOD_TEST_TEMPLATES") == "" {
		t.Skip("it installs packages of npm, PyPI or crates.io: make test-templates does it (TRIPOD_TEST_TEMPLATES=1)")
	}
}

// usePackages uses the packages of JavaScript and Python and the tool of C and Rust in the directories that `make test-templates` has
// filled, because npm, PyPI and crates.io are out of reach.
func usePackages(t *testing.T, lang string) {
	t.Helper()
	dir := filepath.Join(harness.Root(), "build", map[string]string{"c": "bindgen", "js": "npm", "python": "wheels", "rust": "bindgen"}[lang])
	switch lang {
	case "c", "rust":
		t.Setenv("XDG_CACHE_HOME", dir)
	case "js":
		t.Setenv("npm_config_cache", filepath.Join(dir, "cache"))
		t.Setenv("npm_config_offline", "true")
	case "python":
		t.Setenv("PIP_NO_INDEX", "1")
		t.Setenv("PIP_FIND_LINKS", dir)
	default:
		return
	}
	if _, err := os.Stat(filepath.Join(dir, "downloaded")); err != nil {
		t.Fatalf("%v (make test-templates)", err)
	}
}

// newTemplate writes the component of a language.
func newTemplate(t *testing.T, lang string, more ...string) (dir string) {
	t.Helper()
	usePackages(t, lang)
	dir = filepath.Join(t.TempDir(), "shop")
	args := append([]string{"new", "--lang", lang, dir, filepath.Join(harness.Root(), "test", "e2e", "testdata", "templates", "shop.proto")},
		more...)
	if out, code := componentCommand(t, filepath.Dir(dir), args...); code != 0 {
		t.Fatalf("component %q: exit code %d, output %s", args, code, out)
	}
	return dir
}

// TestWasmTemplates: in each language, a new server passes its cases without a change, returns messages with each kind of
// field as they came, and runs as a pod.
func TestWasmTemplates(t *testing.T) {
	templatesOnly(t)
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	message := strings.ReplaceAll(everything, "\n", "")
	cases := fmt.Sprintf(`cases:
- {name: mirrors, method: %[1]s/Mirror, requests: [%[2]s], responses: [%[2]s]}
- {name: repeats, method: %[1]s/Repeat, requests: [%[2]s], responses: [%[2]s]}
- {name: fills, method: %[1]s/Fill, requests: [{name: a}, {amount: 1}], responses: [{}]}
- {name: talks, method: %[1]s/Talk, requests: [%[2]s, {}, {text: a}], responses: [%[2]s, {}, {text: a}]}
- {name: clears, method: %[1]s/Clear, requests: [{}], responses: [{}]}
`, cart, message)
	for lang, more := range map[string][]string{"go": {"--sdk", filepath.Join(harness.Root(), "sdk", "go")}, "c": nil, "js": nil,
		"python": nil, "rust": nil} {
		t.Run(lang, func(t *testing.T) {
			dir := newTemplate(t, lang, more...)
			if out, code := componentCommand(t, dir, "test"); code != 0 || !strings.HasSuffix(out, "\n7 passed, 0 failed\n") {
				t.Errorf("its own cases: exit code %d, output %s", code, out)
			}
			if err := os.WriteFile(filepath.Join(dir, "tests.yaml"), []byte(cases), 0o644); err != nil {
				t.Fatal(err)
			}
			if out, code := componentCommand(t, dir, "test"); code != 0 || !strings.HasSuffix(out, "\n5 passed, 0 failed\n") ||
				strings.Contains(out, "warning") {
				t.Errorf("cases: exit code %d, output %s", code, out)
			}
			_, s := startComponent(t, d, pushWasm(t, dir, "pushed/shop-"+lang+":1"), cart)
			request := s.message(s.method(t, cart+"/Mirror").Input(), everything)
			reply := s.message(s.method(t, cart+"/Mirror").Output(), `{}`)
			if err := s.conn.Invoke(s.context(), "/"+cart+"/Mirror", request, reply); err != nil || !proto.Equal(reply, request) {
				t.Errorf("Mirror: got %v, error %v; want %v", reply, err, request)
			}
			if got, err := s.exchange(cart+"/Talk", `{"u64":"18446744073709551615"}`, `{"text":"b"}`); err != nil ||
				!slices.Equal(got, []string{`{"u64":"18446744073709551615"}`, `{"text":"b"}`}) {
				t.Errorf("Talk: got %v, error %v; want the requests", got, err)
			}
		})
	}
}

// TestWasmTemplateJavaScript: a warm-up, metadata, statuses, logs, mistakes of functions, streams without end, a change of the .proto
// file, and refusals.
func TestWasmTemplateJavaScript(t *testing.T) {
	templatesOnly(t)
	dir := newTemplate(t, "js")
	server, err := os.ReadFile(filepath.Join(harness.Root(), "test", "e2e", "testdata", "templates", "server.js"))
	if err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("server.js", string(server))
	pkg, err := os.ReadFile(filepath.Join(dir, "package.json"))
	if err != nil {
		t.Fatal(err)
	}
	warm := strings.NewReplacer("--world component:app/app", "--world component:app/warm-app", "--js gen/main.js", "--js gen/warm.js")
	write("package.json", warm.Replace(string(pkg)))
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	c, s := startComponent(t, d, pushWasm(t, dir, "pushed/shop:1"), cart, env("SHOP", "corner"))
	var header, trailer metadata.MD
	ctx := metadata.AppendToOutgoingContext(s.context(), "x-request-id", "7", "x-trace-bin", "\x00\xff")
	got, err := s.try(ctx, cart+"/Add", `{"name":"a","amount":"9223372036854775806"}`, grpc.Header(&header), grpc.Trailer(&trailer))
	if err != nil || got != `{"total":"9223372036854775807"}` {
		t.Errorf("Add: got %s, error %v", got, err)
	}
	if !slices.Equal(header.Get("x-request-id"), []string{"7//shop.v1.Cart/Add/corner"}) ||
		!slices.Equal(trailer.Get("x-trace-bin"), []string{"\x00\xff"}) {
		t.Errorf("Add: got header %v and trailer %v", header, trailer)
	}
	_, err = s.try(s.context(), cart+"/Add", `{"name":"status"}`)
	if st := status.Convert(err); st.Code() != codes.FailedPrecondition || st.Message() != "not now: ü" || len(st.Proto().Details) != 1 ||
		st.Proto().Details[0].TypeUrl != "type.googleapis.com/shop.v1.AddRequest" {
		t.Errorf("status: got %v, want FailedPrecondition and one detail", st.Proto())
	}
	for name, want := range map[string]string{"bug": "cannot read property 'total' of undefined", "async": "async", "type": "total"} {
		if _, err := s.try(s.context(), cart+"/Add", `{"name":"`+name+`"}`); status.Code(err) != codes.Internal ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: got error %v, want Internal with %q", name, err, want)
		}
	}
	if got, err := s.try(s.context(), cart+"/Add", `{"name":"nothing"}`); err != nil || got != `{}` {
		t.Errorf("a function without a result: got %s, error %v; want an empty message", got, err)
	}
	_, err = s.try(s.context(), cart+"/Mirror", `{}`)
	wantCode(t, err, codes.Unimplemented) // no function
	if got, err := s.exchange(cart+"/Fill", `{"amount":"9007199254740992"}`, `{"amount":"1"}`); err != nil ||
		!slices.Equal(got, []string{`{"total":"9007199254740993"}`}) {
		t.Errorf("Fill: got %v, error %v", got, err)
	}
	if got, err := s.exchange(cart+"/Talk", `{"text":"a"}`, `{"text":"stop"}`, `{"text":"b"}`); err != nil ||
		!slices.Equal(got, []string{`{"text":"a","adds":[{"name":"more"}]}`}) {
		t.Errorf("Talk: got %v, error %v; want one message", got, err)
	}
	if out := harness.Text(c.Logs(), "stdout"); !strings.Contains(out, `add a {"amount":"9223372036854775806"}`+"\n") {
		t.Errorf("standard output: got %q, want what console.log prints", out)
	}
	if out := harness.Text(c.Logs(), "stderr"); !strings.Contains(out, "TypeError: cannot read property 'total' of undefined\n    at add (") {
		t.Errorf("standard error: got %q, want the error of a function, with its place", out)
	}
	for text, want := range map[string]string{
		strings.Replace(string(server), "*watch(", "*wotch(", 1):            "no method for wotch in shop.v1.Cart",
		strings.Replace(string(server), "'shop.v1.Cart'", "'shop.Cart'", 1): "no service shop.Cart",
		"export const x = ;": "server.js",
	} {
		write("server.js", text)
		if out, code := componentCommand(t, dir, "test"); code != 1 || !strings.Contains(out, want) {
			t.Errorf("component test: exit code %d, output %s; want %q", code, out, want)
		}
	}
	write("server.js", strings.Replace(string(server), "return { total: amount + 1n };", "return { total: amount, note: 5n };", 1))
	proto, err := os.ReadFile(filepath.Join(dir, "proto", "shop.proto"))
	if err != nil {
		t.Fatal(err)
	}
	write("proto/shop.proto",
		strings.Replace(string(proto), "message AddReply { int64 total = 1; }", "message AddReply { int64 total = 1; uint64 note = 2; }", 1))
	write("tests.yaml", "cases:\n- {name: note, method: shop.v1.Cart/Add, requests: [{amount: 1}], responses: [{total: 1, note: 5}]}\n")
	if out, code := componentCommand(t, dir, "test"); code != 1 {
		t.Errorf("without generate: exit code %d, output %s; want a failure", code, out)
	}
	if out, code := componentCommand(t, dir, "generate"); code != 0 {
		t.Errorf("generate: exit code %d, output %s", code, out)
	}
	if out, code := componentCommand(t, dir, "test"); code != 0 {
		t.Errorf("after generate: exit code %d, output %s", code, out)
	}
	var content map[string]any
	if err := json.Unmarshal(pkg, &content); err != nil {
		t.Fatal(err)
	}
	delete(content, "tripod")
	text, err := json.Marshal(content)
	if err != nil {
		t.Fatal(err)
	}
	write("package.json", string(text))
	if out, code := componentCommand(t, dir, "test"); code != 1 || !strings.Contains(out, "does not say what the component serves") {
		t.Errorf("without services: exit code %d, output %s", code, out)
	}
}
