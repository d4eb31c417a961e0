package protowit_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"

	"github.com/tripod-run/tripod/internal/component/protowit"
	"github.com/tripod-run/tripod/internal/component/protowit/protosource"
	"github.com/tripod-run/tripod/internal/component/wit"
)

func descriptorSet(t testing.TB, file string) []byte {
	t.Helper()
	source, err := protosource.Compile(t.Context(), []string{filepath.Join("testdata", file)}, nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := proto.Marshal(source.Set)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// compileText makes a schema of the given file texts.
func compileText(t testing.TB, files map[string]string, names ...string) (*protowit.Schema, error) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var paths []string
	for _, n := range names {
		paths = append(paths, filepath.Join(dir, n))
	}
	source, err := protosource.Compile(t.Context(), paths, []string{dir})
	if err != nil {
		t.Fatal(err)
	}
	return protowit.Compile(source.Set, source.Services...)
}

// TestSignatures checks the types of the guest's functions for each arity.
func TestSignatures(t *testing.T) {
	s := compile(t, "greet.proto")
	var got []string
	for _, m := range s.Methods[:4] {
		line := m.Procedure + " " + m.Interface + "#" + m.Function
		for _, p := range m.Params {
			line += " " + p.String()
		}
		got = append(got, line+" -> "+m.Result.String())
	}
	const streams = "proto:greet-v1/greeter-streams#"
	want := []string{
		"/greet.v1.Greeter/SayHello proto:greet-v1/greeter#say-hello context hello-request -> result<hello-reply, status>",
		"/greet.v1.Greeter/ReplyMany proto:greet-v1/greeter#reply-many context hello-request borrow<" + streams +
			"hello-reply-writer> -> result<_, status>",
		"/greet.v1.Greeter/GreetAll proto:greet-v1/greeter#greet-all context borrow<" + streams +
			"hello-request-reader> -> result<hello-reply, status>",
		"/greet.v1.Greeter/Chat proto:greet-v1/greeter#chat context borrow<" + streams + "hello-request-reader> borrow<" +
			streams + "hello-reply-writer> -> result<_, status>",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	r, w := s.Methods[3].Reader, s.Methods[3].Writer
	if r != s.Methods[2].Reader || w != s.Methods[1].Writer {
		t.Error("methods of a service do not share the resource for the same message")
	}
	if r.Function != "[method]hello-request-reader.next" || r.Result.String() != "result<option<hello-request>, status>" ||
		len(r.Params) != 1 {
		t.Errorf("reader: function %s, params %v, result %v", r.Function, r.Params, r.Result)
	}
	if w.Function != "[method]hello-reply-writer.send" || w.Result.String() != "result<_, status>" || len(w.Params) != 2 {
		t.Errorf("writer: function %s, params %v, result %v", w.Function, w.Params, w.Result)
	}
}

// TestPackages: services of several protobuf packages make one world that includes all of their worlds.
func TestPackages(t *testing.T) {
	s, err := compileText(t, map[string]string{
		"a.proto": `syntax = "proto3"; package one; import "b.proto"; service S { rpc M(two.Shared) returns (two.Shared); }`,
		"b.proto": `syntax = "proto3"; package two; message Shared { string x = 1; } service T { rpc N(Shared) returns (Shared); }`,
	}, "a.proto", "b.proto")
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, f := range s.WIT() {
		paths = append(paths, f.Path)
	}
	want := []string{"deps/tripod-grpc/grpc.wit", "deps/proto-one/one.wit", "deps/proto-two/two.wit", "component.wit"}
	if !slices.Equal(paths, want) {
		t.Errorf("files %q, want %q", paths, want)
	}
	text := s.Document()
	for _, want := range []string{"include proto:one/server;", "include proto:two/server;", "record two-shared", "record shared"} {
		if !strings.Contains(text, want) {
			t.Errorf("the text lacks %q:\n%s", want, text)
		}
	}
	if s.Methods[0].Interface != "proto:one/s" || s.Methods[1].Interface != "proto:two/t" {
		t.Errorf("interfaces %s, %s; want proto:one/s, proto:two/t", s.Methods[0].Interface, s.Methods[1].Interface)
	}
}

// TestRootServices: without names, services of imported files are not included.
func TestRootServices(t *testing.T) {
	files := map[string]string{
		"a.proto": `syntax = "proto3"; import "b.proto"; service S { rpc M(Shared) returns (Shared); }`,
		"b.proto": `syntax = "proto3"; message Shared { string x = 1; } service T { rpc N(Shared) returns (Shared); }`,
	}
	s, err := compileText(t, files, "a.proto")
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Methods) != 1 || s.Methods[0].Procedure != "/S/M" || s.Methods[0].Interface != "proto:root/s" {
		t.Errorf("%d methods, the first %+v; want only /S/M of proto:root/s", len(s.Methods), s.Methods[0])
	}
}

// TestRefused: the error names what cannot be mapped.
func TestRefused(t *testing.T) {
	bomb := "syntax = \"proto2\"; service S { rpc M(A0) returns (A0); }\n"
	for i := range 30 {
		bomb += fmt.Sprintf("message A%d { optional A%d a = 1; optional A%d b = 2; }\n", i, i+1, i+1)
	}
	bomb += "message A30 { optional int64 x = 1; }"
	for name, tc := range map[string]struct{ text, want string }{
		"message set": {`syntax = "proto2"; service S { rpc M(A) returns (A); }
			message A { optional B b = 1; } message B { option message_set_wire_format = true; extensions 4 to max; }`, `"B" is a MessageSet`},
		"messages that double at each level": {bomb, "more than 1048576"},
	} {
		_, err := compileText(t, map[string]string{"x.proto": tc.text}, "x.proto")
		if err == nil || !strings.Contains(err.Error(), tc.want) || !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Errorf("%s: error %v, want %q", name, err, tc.want)
		}
	}
	set := descriptorSet(t, "greet.proto")
	for name, tc := range map[string]struct {
		set      []byte
		services []string
		want     string
	}{
		"no descriptors":     {[]byte("\xff\xff"), nil, "not a FileDescriptorSet"},
		"an empty set":       {nil, nil, "no file in the set"},
		"a service too much": {set, []string{"greet.v1.Other"}, `no service "greet.v1.Other"`},
		"no service":         {set, []string{"greet.v1.HelloRequest"}, `no service "greet.v1.HelloRequest"`},
		"a missing import":   {wire{}.bytes(1, wire{}.text(1, "a.proto").text(3, "b.proto")), nil, "a.proto imports b.proto"},
	} {
		_, err := protowit.Parse(tc.set, tc.services...)
		if err == nil || !strings.Contains(err.Error(), tc.want) || !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Errorf("%s: error %v, want %q", name, err, tc.want)
		}
	}
}

// TestWellKnownTypesAreBuiltIn: a set may omit the files of google.protobuf.
func TestWellKnownTypesAreBuiltIn(t *testing.T) {
	source, err := protosource.Compile(t.Context(), []string{"testdata/greet.proto"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	source.Set.File = source.Set.File[len(source.Set.File)-1:]
	s, err := protowit.Compile(source.Set)
	if err != nil {
		t.Fatal(err)
	}
	if s.Document() != compile(t, "greet.proto").Document() {
		t.Error("the text differs from that of the complete set")
	}
}

// TestHostValues: the host's values have the types of the WIT.
func TestHostValues(t *testing.T) {
	timeout := uint64(5)
	for _, c := range []*protowit.Context{
		{Method: "/a/b", Peer: "1.2.3.4:5", Timeout: &timeout, Metadata: []protowit.Entry{{"k", []byte("v")}, {"k-bin", []byte{0xff}}}}, {},
	} {
		flat := wit.NewReader(protowit.AppendContext(nil, c))
		flat.Check(protowit.ContextType)
		if flat.Err() != nil || len(flat.Rest()) > 0 {
			t.Errorf("AppendContext: %v, %d bytes left", flat.Err(), len(flat.Rest()))
		}
	}
	status := protowit.Status{Code: 5, Message: "not there", Details: [][]byte{{1}, {2, 3}}}
	flat := protowit.AppendStatus(nil, &status)
	r := wit.NewReader(flat)
	r.Check(protowit.StatusType)
	if r.Err() != nil || len(r.Rest()) > 0 {
		t.Errorf("AppendStatus: %v, %d bytes left", r.Err(), len(r.Rest()))
	}
	if got := protowit.ReadStatus(wit.NewReader(flat)); fmt.Sprint(got) != fmt.Sprint(status) {
		t.Errorf("ReadStatus = %v, want %v", got, status)
	}
	r = wit.NewReader(flat[:len(flat)-1])
	if got := protowit.ReadStatus(r); r.Err() == nil || got.Code != 0 {
		t.Errorf("ReadStatus of a truncated status = %v, error %v; want an error", got, r.Err())
	}
	e := protowit.ReadEntry(wit.NewReader(wit.AppendBytes(wit.AppendString(nil, "k"), []byte("v"))))
	if e.Key != "k" || string(e.Value) != "v" {
		t.Errorf("ReadEntry = %v, want k: v", e)
	}
}
