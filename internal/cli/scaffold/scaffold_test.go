package scaffold

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/tripod-run/tripod/internal/cli/toolchain"
	"github.com/tripod-run/tripod/internal/component/protowit/protosource"
)

const (
	sdk     = "../../../sdk/go"
	example = "../../../examples/wasm/greeter-go"
)

const shop = `syntax = "proto3";
package shop.v1;
import "google/protobuf/empty.proto";
import "lib/common.proto";
// Cart holds items.
service Cart {
  // Add adds an item.
  rpc Add(AddRequest) returns (AddReply);
  rpc Watch(AddRequest) returns (stream AddReply);
  rpc Fill(stream AddRequest) returns (AddReply);
  rpc Talk(stream AddRequest) returns (stream AddReply);
  rpc Clear(google.protobuf.Empty) returns (google.protobuf.Empty);
  rpc Mirror(stream lib.Item) returns (stream lib.Item);
}
message AddRequest { lib.Item item = 1; }
message AddReply { int64 total = 1; message Line {} }
`

// protos writes .proto files and returns their directory.
func protos(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		write(t, filepath.Join(dir, name), text)
	}
	return dir
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestNew: the server compiles (New checks it) with a method and a case for each rpc, and so does the code that is
// generated again after a change.
func TestNew(t *testing.T) {
	dir := protos(t, map[string]string{"shop.proto": shop,
		"lib/common.proto": `syntax = "proto3"; package lib; message Item { string name = 1; } service Unwanted { rpc M(Item) returns (Item); }`})
	parent := t.TempDir()
	write(t, parent+"/go.work", "go 1.26\n") // somebody's workspace
	out := filepath.Join(parent, "below", "cart-2")
	if err := New(t.Context(), Options{Dir: out, Protos: []string{dir + "/shop.proto"}, SDK: sdk}); err != nil {
		t.Fatal(err)
	}
	server := read(t, out+"/main.go")
	for _, want := range []string{
		"// Add adds an item.\nfunc (s *cartServer) Add(ctx context.Context, request *shopv1.AddRequest) (*shopv1.AddReply, error)",
		"Watch(request *shopv1.AddRequest, stream grpc.ServerStreamingServer[shopv1.AddReply]) error",
		"Fill(stream grpc.ClientStreamingServer[shopv1.AddRequest, shopv1.AddReply]) error",
		"Talk(stream grpc.BidiStreamingServer[shopv1.AddRequest, shopv1.AddReply]) error",
		"Clear(ctx context.Context, request *emptypb.Empty) (*emptypb.Empty, error)",
		"Mirror(stream grpc.BidiStreamingServer[lib.Item, lib.Item]) error",
		"shopv1.RegisterCartServer(server, &cartServer{})",
	} {
		if !strings.Contains(server, want) {
			t.Errorf("main.go has no %q:\n%s", want, server)
		}
	}
	if strings.Contains(server, "Unwanted") {
		t.Errorf("main.go has a service of an import:\n%s", server)
	}
	if got := strings.Count(read(t, out+"/tests.yaml"), "method: shop.v1.Cart/"); got != 6 {
		t.Errorf("cases: got %d, want 6", got)
	}
	write(t, out+"/proto/shop.proto", strings.ReplaceAll(shop, "message Line {}", "message Line { string text = 1; }"))
	if err := Generate(t.Context(), out, io.Discard); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(read(t, out+"/gen/shop/v1/shop.pb.go"), "GetText()") {
		t.Error("the generated code has no new field")
	}
	if _, err := toolchain.Go.Run(t.Context(), out, env, nil, "vet", "./..."); err != nil {
		t.Error(err)
	}
}

// TestNewNames: packages and services of any names make a server that compiles.
func TestNewNames(t *testing.T) {
	dir := protos(t, map[string]string{
		"a.proto":     `syntax = "proto3"; import "b/log.proto"; service main { rpc get_it(In.Side) returns (b.context.M); } message In { message Side {} }`,
		"b/log.proto": `syntax = "proto3"; package b.context; message M {} service Main { rpc N(M) returns (M); }`,
		"c.proto":     `syntax = "proto2"; package go.func.v2; service Main { rpc Watch(M) returns (stream M); } message M {}`,
	})
	err := New(t.Context(), Options{
		Dir: filepath.Join(t.TempDir(), "names"), Protos: []string{dir + "/a.proto", dir + "/b/log.proto", dir + "/c.proto"},
		ImportPaths: []string{dir}, SDK: sdk, Module: "shop.example/x/y",
	})
	if err != nil {
		t.Error(err)
	}
}

// TestNewRefused: a refusal says why and leaves nothing behind.
func TestNewRefused(t *testing.T) {
	dir := protos(t, map[string]string{"shop.proto": `syntax = "proto3"; service S { rpc M(A) returns (A); } message A {}`,
		"none.proto": `syntax = "proto3";`, "bad.proto": "no"})
	parent := t.TempDir()
	existing := filepath.Join(parent, "existing")
	if err := os.Mkdir(existing, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		o    Options
		is   func(error) bool
		want string
	}{
		{Options{Dir: "existing", Protos: []string{"shop.proto"}}, errdefs.IsAlreadyExists, "exists"},
		{Options{Dir: "Upper", Protos: []string{"shop.proto"}}, errdefs.IsInvalidArgument, `the name "Upper"`},
		{Options{Dir: "x", Protos: []string{"none.proto"}}, errdefs.IsInvalidArgument, "no service in"},
		{Options{Dir: "x", Protos: []string{"bad.proto"}}, errdefs.IsInvalidArgument, "bad.proto:1:"},
		{Options{Dir: "x", Protos: []string{"missing.proto"}}, errdefs.IsNotFound, "missing.proto"},
		{Options{Dir: "x", Protos: []string{"shop.proto"}, Language: "cobol"}, errdefs.IsInvalidArgument, "only c, go, js, python and rust"},
		{Options{Dir: "x", Protos: []string{"shop.proto"}, Language: "js", SDK: sdk}, errdefs.IsInvalidArgument, "--lang go"},
		{Options{Dir: "x", Protos: []string{"shop.proto"}, Language: "python", Module: "m"}, errdefs.IsInvalidArgument, "--lang go"},
		{Options{Dir: "x", Protos: []string{"shop.proto"}, SDK: parent}, errdefs.IsInvalidArgument, "--sdk"},
		{Options{Dir: "x", Protos: []string{"shop.proto"}, Module: "a b"}, errdefs.IsInvalidArgument, "--module"},
		{Options{Dir: "x", Protos: []string{"shop.proto"}, Module: "bad//path"}, errdefs.IsInvalidArgument, "bad//path"},
	} {
		tc.o.Dir, tc.o.Protos[0] = filepath.Join(parent, tc.o.Dir), filepath.Join(dir, tc.o.Protos[0])
		if tc.o.SDK == "" && tc.o.Language == "" {
			tc.o.SDK = sdk
		}
		if err := New(t.Context(), tc.o); !tc.is(err) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("New(%+v): got %v, want another code or %q", tc.o, err, tc.want)
		}
	}
	if err := Generate(t.Context(), parent, io.Discard); !errdefs.IsNotFound(err) {
		t.Errorf("Generate without files: got %v, want ErrNotFound", err)
	}
	t.Setenv("PATH", parent)
	err := New(t.Context(), Options{Dir: filepath.Join(parent, "x"), Protos: []string{dir + "/shop.proto"}, SDK: sdk})
	if !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "Go toolchain (go) in PATH") {
		t.Errorf("New without Go: got %v, want ErrUnavailable", err)
	}
	err = New(t.Context(), Options{Dir: filepath.Join(parent, "x"), Protos: []string{dir + "/shop.proto"}, Language: "js"})
	if !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "with npm in PATH") {
		t.Errorf("New without npm: got %v, want ErrUnavailable", err)
	}
	err = New(t.Context(), Options{Dir: filepath.Join(parent, "x"), Protos: []string{dir + "/shop.proto"}, Language: "python"})
	if !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "(python3) in PATH") {
		t.Errorf("New without Python: got %v, want ErrUnavailable", err)
	}
	if left, err := os.ReadDir(parent); err != nil || len(left) != 1 {
		t.Errorf("left behind: %v, error %v", left, err)
	}
}

// TestJavaScript: the server has a function for each method, whose names are those of Protobuf-ES.
func TestJavaScript(t *testing.T) {
	dir := protos(t, map[string]string{"a.proto": `syntax = "proto3"; package p;
import "google/protobuf/empty.proto";
// Not a comment of a method.
service delete {
  // Comments can end lines as in JavaScript.
  rpc Constructor(M) returns (M);
  rpc Delete(stream M) returns (google.protobuf.Empty);
  rpc get_it(M) returns (stream M);
  rpc toString(stream M) returns (stream google.protobuf.Empty);
}
message M {}`, "same.proto": `syntax = "proto3"; service S { rpc Get(M) returns (M); rpc get(M) returns (M); } message M {}`})
	source, err := protosource.Compile(t.Context(), []string{dir + "/a.proto"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	p, err := newJSProject(source)
	if err != nil {
		t.Fatal(err)
	}
	out := t.TempDir()
	if err := writeTemplates(out, "js", p.data("names")); err != nil {
		t.Fatal(err)
	}
	server := read(t, out+"/server.js")
	for _, want := range []string{
		"  'p.delete': {\n    // Comments can end\n    //lines as in JavaScript.\n    constructor$(request, call) {\n      return request;\n    },\n",
		"\n    delete(requests, call) {\n", "\n    *get_it(request, call) {\n      yield request;\n", "\n    *toString$(requests, call) {\n",
	} {
		if !strings.Contains(server, want) {
			t.Errorf("server.js has no %q:\n%s", want, server)
		}
	}
	if services, err := packageServices(out); err != nil || !slices.Equal(services, []string{"p.delete"}) {
		t.Errorf("services of package.json: got %v, error %v", services, err)
	}
	if got := strings.Count(read(t, out+"/tests.yaml"), "method: p.delete/"); got != 4 {
		t.Errorf("cases: got %d, want 4", got)
	}
	err = New(t.Context(), Options{Dir: filepath.Join(out, "same"), Protos: []string{dir + "/same.proto"}, Language: "js"})
	if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), "the methods Get and get of S have the same name in JavaScript") {
		t.Errorf("New with two methods of one name: got %v, want ErrInvalidArgument", err)
	}
}

// TestEmptyJSON: messages without content have the forms of protobuf's JSON, which are not always objects.
func TestEmptyJSON(t *testing.T) {
	for want, messages := range map[string][]proto.Message{
		`""`: {&wrapperspb.StringValue{}, &wrapperspb.BytesValue{}}, `"0"`: {&wrapperspb.Int64Value{}}, "0": {&wrapperspb.DoubleValue{}},
		"false": {&wrapperspb.BoolValue{}},
		`"0s"`:  {&durationpb.Duration{}}, "{}": {&emptypb.Empty{}, &structpb.Struct{}, &descriptorpb.UninterpretedOption_NamePart{}},
		"[]": {&structpb.ListValue{}}, "null": {&structpb.Value{}},
	} {
		for _, m := range messages {
			if got := emptyJSON(m.ProtoReflect().Descriptor()); got != want {
				t.Errorf("%T: got %s, want %s", m, got, want)
			}
		}
	}
}

// TestVersions: new servers require what the SDK requires.
func TestVersions(t *testing.T) {
	sum, err := templates.ReadFile("templates/go/go.sum.tmpl")
	if want := read(t, sdk+"/go.sum"); err != nil || string(sum) != want {
		t.Errorf("templates/go.sum.tmpl: got error %v and\n%s\nwant sdk/go/go.sum:\n%s", err, sum, want)
	}
	mod, err := templates.ReadFile("templates/go/go.mod.tmpl")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(read(t, example+"/go.mod")) {
		if module, _, ok := strings.Cut(line, " v"); ok && !strings.Contains(module, SDKModule) && !bytes.Contains(mod, []byte(line)) {
			t.Errorf("templates/go.mod.tmpl has no line %q, which a server needs", line)
		}
	}
}
