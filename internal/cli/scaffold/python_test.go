package scaffold

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/protowit/protosource"
)

// writePython writes the templates and the WIT of .proto files, without the packages of PyPI.
func writePython(t *testing.T, files map[string]string, names ...string) (out string, p *pythonProject) {
	t.Helper()
	dir := protos(t, files)
	for i := range names {
		names[i] = filepath.Join(dir, names[i])
	}
	source, err := protosource.Compile(t.Context(), names, []string{dir})
	if err != nil {
		t.Fatal(err)
	}
	if p, err = newPythonProject(source); err != nil {
		t.Fatal(err)
	}
	out = t.TempDir()
	if err := writeTemplates(out, "python", p.data("shop")); err != nil {
		t.Fatal(err)
	}
	if _, err := writeWIT(out, source.Set, p.services); err != nil {
		t.Fatal(err)
	}
	return out, p
}

func wantText(t *testing.T, file string, want ...string) {
	t.Helper()
	text := read(t, file)
	for _, w := range want {
		if !strings.Contains(text, w) {
			t.Errorf("%s has no %q:\n%s", filepath.Base(file), w, text)
		}
	}
}

// TestPython: the server has a method for each rpc, with the types of componentize-py, and the WIT has the services of the
// files, not those of imports.
func TestPython(t *testing.T) {
	out, p := writePython(t, map[string]string{
		"shop.proto":       shop,
		"lib/common.proto": `syntax = "proto3"; package lib; message Item { string name = 1; } service Unwanted { rpc Get(Item) returns (Item); }`,
	}, "shop.proto")
	wantText(t, out+"/server.py",
		"from wit_world.imports import cart_streams, shop_v1\nfrom wit_world.imports.tripod_grpc import Context, Status",
		"class Cart(exports.Cart):\n    \"\"\"Cart holds items.\"\"\"\n\n    def add(self, context: Context, request: shop_v1.AddRequest) -> shop_v1.AddReply:\n        \"\"\"Add adds an item.\"\"\"\n        return shop_v1.AddReply(total=0)\n",
		"\n\n    def watch(self, context: Context, request: shop_v1.AddRequest, replies: cart_streams.AddReplyWriter) -> None:\n        replies.send(shop_v1.AddReply(total=0))\n",
		"def fill(self, context: Context, requests: cart_streams.AddRequestReader) -> shop_v1.AddReply:\n        while (request := requests.next()) is not None:\n",
		"def talk(self, context: Context, requests: cart_streams.AddRequestReader, replies: cart_streams.AddReplyWriter) -> None:\n",
		"def clear(self, context: Context, request: shop_v1.GoogleProtobufEmpty) -> shop_v1.GoogleProtobufEmpty:\n        return request\n",
		"def mirror(self, context: Context, requests: cart_streams.LibItemReader, replies: cart_streams.LibItemWriter) -> None:\n        while (request := requests.next()) is not None:\n            replies.send(request)\n",
	)
	if services, err := pythonServices(out); err != nil || !slices.Equal(services, []string{"shop.v1.Cart"}) {
		t.Errorf("services of pyproject.toml: got %v, error %v", services, err)
	}
	if got := strings.Count(read(t, out+"/tests.yaml"), "method: shop.v1.Cart/"); got != 6 {
		t.Errorf("cases: got %d, want 6", got)
	}
	wantText(t, out+"/wit/shop-v1.wit", "export cart;")
	wantText(t, out+"/requirements.txt", "componentize-py==", "--hash=sha256:")
	if want := []string{"lib/common.proto", "shop.proto"}; !slices.Equal(p.own(), want) {
		t.Errorf("own files: got %v, want %v", p.own(), want)
	}
	wantFlags := []string{
		"--import-interface-name", "tripod:grpc/types@0.1.0=tripod-grpc", "--import-interface-name", "tripod:grpc/response@0.1.0=response",
		"--export-interface-name", "proto:shop-v1/cart=cart", "--import-interface-name", "proto:shop-v1/types=shop-v1",
		"--import-interface-name", "proto:shop-v1/cart-streams=cart-streams",
	}
	if !slices.Equal(p.names.flags, wantFlags) {
		t.Errorf("flags: got %q, want %q", p.names.flags, wantFlags)
	}
	if !CanBuild(out) || CanBuild(filepath.Join(out, "wit")) {
		t.Errorf("CanBuild: got %v for the directory and %v for another one, want true and false", CanBuild(out),
			CanBuild(filepath.Join(out, "wit")))
	}
}

// TestPythonNames: keywords, names of several packages, comments and each kind of reply become Python.
func TestPythonNames(t *testing.T) {
	out, _ := writePython(t, map[string]string{
		"a.proto": `syntax = "proto3"; package class;
import "google/protobuf/wrappers.proto";
import "b.proto";
// A \ and """ and
// a "quote"
service Status {
  rpc Import(None) returns (b.All);
  rpc Text(google.protobuf.StringValue) returns (google.protobuf.StringValue);
  rpc Blob(stream google.protobuf.BytesValue) returns (google.protobuf.BoolValue);
}
message None {}`,
		"b.proto": `syntax = "proto3"; package b;
service Status { rpc Get(All) returns (stream All); }
message All {
  bool lambda = 1; double d = 2; int64 i = 3; bytes data = 4; Color color = 5; optional string note = 6; repeated bool list = 7;
  map<string, Color> map = 8; oneof choice { string s = 9; bool b = 10; } All more = 11; repeated All all = 12;
}
enum Color { COLOR_NONE = 0; COLOR_RED = 1; }`,
	}, "a.proto", "b.proto")
	wantText(t, out+"/server.py",
		"from wit_world.imports import b, class_, status_streams, status_streams2\n",
		"class Status2(exports.Status2):\n    \"\"\"A \\\\ and \\\"\\\"\\\" and\n    a \"quote\"\n    \"\"\"\n\n    def import_(self, context: Context, request: class_.None_) -> class_.BAll:\n",
		`return class_.BAll(lambda_=False, d=0.0, i=0, data=b"", color=class_.BColor_None_(), note=None, list=[], map=[], choice=None, more=None, all=[])`,
		"def text(self, context: Context, request: str) -> str:\n        return request\n",
		"def blob(self, context: Context, requests: status_streams.GoogleProtobufBytesValueReader) -> bool:\n", "        return False\n",
		"class Status3(exports.Status3):\n    def get(self, context: Context, request: b.All, replies: status_streams2.AllWriter) -> None:\n        replies.send(request)\n",
	)
}

// TestPythonRefused: what is missing is said before anything is installed.
func TestPythonRefused(t *testing.T) {
	out, p := writePython(t, map[string]string{"s.proto": `syntax = "proto3"; service S { rpc M(A) returns (A); } message A {}`}, "s.proto")
	path := t.TempDir()
	t.Setenv("PATH", path)
	refused := func(what, want string, is func(error) bool) {
		t.Helper()
		err := generatePython(t.Context(), out, p.set)
		if !is(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got error %v, want %q", what, err, want)
		}
	}
	refused("no Python", "Python 3.11 or later (python3) in PATH", errdefs.IsUnavailable)
	python := filepath.Join(path, "python3")
	for answer, want := range map[string]string{"venv": "Debian's package python3-venv", "old": "older than 3.11"} {
		if err := os.WriteFile(python, []byte("#!/bin/sh\necho "+answer+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		refused(answer, want, errdefs.IsUnavailable)
	}
	if exists(out, environmentDir) {
		t.Errorf("%s was made", environmentDir)
	}
	for text, want := range map[string]string{
		"[tool.other]\n": "does not say what the component serves", "[tool.tripod]\nservices = 1\n": "pyproject.toml",
		"[tool.tripod]\nservices = [\"no.Such\"]\n": "no.Such",
	} {
		write(t, filepath.Join(out, projectFile), text)
		refused(text, want, errdefs.IsInvalidArgument)
	}
}

// TestPythonExample: examples/wasm/greeter-python is built with the packages that new components have.
func TestPythonExample(t *testing.T) {
	want, err := os.ReadFile("templates/python/requirements.txt.tmpl")
	if err != nil {
		t.Fatal(err)
	}
	wantText(t, "../../../examples/wasm/greeter-python/requirements.txt", string(want))
}

// TestSharedProtos: the directory proto of a component can be a link, such as to that of another component.
func TestSharedProtos(t *testing.T) {
	shared := protos(t, map[string]string{"deep/a.proto": `syntax = "proto3"; package a; service A {}`})
	dir := t.TempDir()
	if err := os.Symlink(shared, filepath.Join(dir, protoDir)); err != nil {
		t.Fatal(err)
	}
	if source, err := compileProtos(t.Context(), dir); err != nil || !slices.Equal(source.Services, []string{"a.A"}) {
		t.Errorf("compileProtos() = %+v, %v; want the service a.A", source, err)
	}
}
