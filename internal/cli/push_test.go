package cli

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-containerregistry/pkg/registry"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/disk/qcow2"
)

const examples = "../../examples/wasm/"

// pushTo runs `tripod push` and returns what it printed.
func pushTo(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	app := &App{Stdout: &out, Stderr: io.Discard}
	c := app.PushCommand()
	c.SetArgs(append([]string{"--docker-config", "", "--hosts-dir", t.TempDir()}, args...))
	c.SilenceErrors, c.SilenceUsage = true, true
	err := c.ExecuteContext(t.Context())
	return strings.TrimSpace(out.String()), err
}

// newRegistry returns a registry that counts writes.
func newRegistry(t *testing.T) (host string, writes *atomic.Int64) {
	store := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	writes = new(atomic.Int64)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			writes.Add(1)
		}
		store.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://"), writes
}

func TestPushGreeter(t *testing.T) {
	host, writes := newRegistry(t)
	args := []string{
		examples + "greeter-c/greeter-c.wasm", host + "/greeter:1", "--proto", examples + "greeter/greeter.proto",
		"--component", "example.com:greet.Greeter@1.0.0+5", "--annotation", "note=x", "--plain-http",
	}
	ref, err := pushTo(t, args...)
	if err != nil {
		t.Fatal(err)
	}
	repo, digest, _ := strings.Cut(ref, "@")
	if repo != host+"/greeter" {
		t.Errorf("push printed %q, want the repository %s/greeter", ref, host)
	}
	resp, err := http.Get("http://" + host + "/v2/greeter/manifests/1")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var m ocispec.Manifest
	if err := json.NewDecoder(resp.Body).Decode(&m); err != nil {
		t.Fatal(err)
	}
	if resp.Header.Get("Docker-Content-Digest") != digest {
		t.Errorf("the tag's digest: got %s, want %s", resp.Header.Get("Docker-Content-Digest"), digest)
	}
	var types []string
	for _, layer := range append([]ocispec.Descriptor{m.Config}, m.Layers...) {
		types = append(types, layer.MediaType)
	}
	want := "application/vnd.wasm.config.v0+json application/wasm application/vnd.tripod.protobuf.descriptorset.v1+protobuf"
	if got := strings.Join(types, " "); got != want {
		t.Errorf("blobs: got %s, want %s", got, want)
	}
	notes := m.Annotations
	if len(notes) != 4 || notes["vimana.host/domain"] != "example.com" || notes["vimana.host/server"] != "greet.Greeter" ||
		notes["vimana.host/version"] != "1.0.0_5" {
		t.Errorf("annotations: got %v, want the component's name", notes)
	}

	writes.Store(0)
	document, err := pushTo(t, append(args, "-o", "json")...)
	if err != nil {
		t.Fatal(err)
	}
	var again pushed
	if err := json.Unmarshal([]byte(document), &again); err != nil {
		t.Fatal(err)
	}
	if again.Reference != ref || again.Digest != digest || again.World != "grpc" || len(again.Layers) != 3 ||
		again.Services[0] != "greet.v1.Greeter" {
		t.Errorf("second push of the same files: got %+v, want reference %s and digest %s", again, ref, digest)
	}
	if n := writes.Load(); n != 0 {
		t.Errorf("second push of the same files: got %d writes, want 0", n)
	}
}

// TestPushNotesServices: the manifest lists the services if the descriptors alone would name others.
func TestPushNotesServices(t *testing.T) {
	dir := t.TempDir()
	two := filepath.Join(dir, "two.proto")
	text := `syntax = "proto3"; package greet.v1; import "greeter.proto";
		service Other { rpc Do(HelloRequest) returns (HelloReply); }`
	if err := os.WriteFile(two, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{examples + "greeter-c/greeter-c.wasm", "localhost:1/x:1", "--dry-run", "-o", "json", "-I", dir, "-I",
		examples + "greeter", "--proto", two}
	if _, err := pushTo(t, args...); err == nil || !strings.Contains(err.Error(), "proto:greet-v1/other") {
		t.Errorf("push with a service that the component does not have: got error %v", err)
	}
	document, err := pushTo(t, append(args, "--service", "greet.v1.Greeter")...)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(document, `"tripod.dev/services": "greet.v1.Greeter"`) {
		t.Errorf("push printed %s, want the annotation of the services", document)
	}
}

func TestPushRefuses(t *testing.T) {
	host, writes := newRegistry(t)
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	greeter, proto := examples+"greeter-c/greeter-c.wasm", examples+"greeter/greeter.proto"
	binary, err := os.ReadFile(greeter)
	if err != nil {
		t.Fatal(err)
	}
	for words, args := range map[string][]string{
		"not WebAssembly":                        {file("text.wasm", "#!/bin/sh")},
		"cut off":                                {file("cut.wasm", string(binary[:len(binary)-1])), "--proto", proto},
		"--proto":                                {greeter},
		"does not export proto:greet-v1/greeter": {examples + "faults-c/faults-c.wasm", "--proto", proto},
		"a core module cannot serve":             {examples + "command-go/command-go.wasm", "--proto", proto},
		"bad.proto:1":                            {greeter, "--proto", file("bad.proto", "no proto")},
		"no such file":                           {filepath.Join(dir, "none.wasm")},
		"not a FileDescriptorSet":                {greeter, "--descriptors", file("junk.pb", "\xff\xff")},
		"use either --proto or --descriptors":    {greeter, "--descriptors", file("set.pb", ""), "--proto", proto},
		"--component":                            {greeter, "--proto", proto, "--component", "Greeter"},
		"--service needs":                        {greeter, "--service", "greet.v1.Greeter"},
		"no.Such":                                {greeter, "--proto", proto, "--service", "no.Such"},
		"--creds":                                {greeter, "--proto", proto, "--creds", "me"},
		"--compiled needs --key":                 {greeter, "--proto", proto, "--compiled"},
		"--key is for --compiled":                {greeter, "--proto", proto, "--key", file("key.pem", "")},
		"none.pem: no such file":                 {greeter, "--proto", proto, "--compiled", "--key", filepath.Join(dir, "none.pem")},
		"it is not a PEM file":                   {greeter, "--proto", proto, "--compiled", "--key", file("text.pem", "a key")},
		"are for WebAssembly components": {file("disk.raw", strings.Repeat("\x00", 510)+"\x55\xaa"+strings.Repeat("\x00", 512)),
			"--compiled", "--key", file("key.pem", "")},
	} {
		_, err := pushTo(t, append([]string{args[0], host + "/x:1", "--plain-http"}, args[1:]...)...)
		if err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("push %v: got error %v, want one with %q", args, err, words)
		}
	}
	if _, err := pushTo(t, greeter, "UPPER/x:1", "--proto", proto); err == nil || !strings.Contains(err.Error(), "UPPER") {
		t.Errorf("push to an invalid reference: got error %v, want one with the reference", err)
	}
	if n := writes.Load(); n != 0 {
		t.Errorf("rejected pushes: got %d writes, want 0", n)
	}
}

// TestPushDisk: push recognises a disk by its content, pushes it as one layer, and rejects a disk that a node would
// reject.
func TestPushDisk(t *testing.T) {
	host, writes := newRegistry(t)
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	if err := qcow2.CreateOverlay(t.Context(), path("disk"), 1<<30, qcow2.Overlay{}); err != nil {
		t.Fatal(err)
	}
	image, err := os.ReadFile(path("disk"))
	if err != nil {
		t.Fatal(err)
	}
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	if _, err := w.Write(image); err != nil || w.Close() != nil {
		t.Fatal(err)
	}
	backed := bytes.Clone(image)
	backed[15] = 8
	for name, data := range map[string][]byte{"packed.qcow2.gz": packed.Bytes(), "x.raw": []byte("raw"), "bad.qcow2": []byte("text"),
		"backed": backed, "text": []byte("text")} {
		if err := os.WriteFile(path(name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{
		"disk": "application/vnd.tripod.disk.qcow2", "packed.qcow2.gz": "application/vnd.tripod.disk.qcow2+gzip",
		"x.raw": "application/vnd.tripod.disk.raw",
	} {
		out, err := pushTo(t, path(name), host+"/disks/a:1", "--plain-http", "-o", "json", "--annotation", "note=x")
		var got pushed
		if err != nil || json.Unmarshal([]byte(out), &got) != nil || len(got.Layers) != 2 || got.Layers[1].MediaType != want ||
			got.Annotations["note"] != "x" {
			t.Errorf("push of %s: got %s, %v; want a layer of the type %s", name, out, err, want)
		}
	}
	if writes.Load() == 0 {
		t.Error("push of disks: got 0 writes, want some")
	}
	for name, word := range map[string]string{"bad.qcow2": "magic", "backed": "backing file", "text": "not WebAssembly"} {
		if _, err := pushTo(t, path(name), host+"/disks/b:1", "--plain-http"); !errdefs.IsInvalidArgument(err) ||
			!strings.Contains(err.Error(), word) {
			t.Errorf("push of %s: got error %v, want invalid argument with %q", name, err, word)
		}
	}
	if _, err := pushTo(t, path("disk"), host+"/disks/b:1", "--proto", "x.proto"); !errdefs.IsInvalidArgument(err) {
		t.Errorf("push of a disk with --proto: got error %v, want invalid argument", err)
	}
}

// TestPushWarns: 64-bit integers lose precision in JavaScript, whose numbers are floats; the warning names the fields.
func TestPushWarns(t *testing.T) {
	const wide = "../sandbox/wasm/program/testdata/wide-js/wide"
	for name, c := range map[string]struct {
		args []string
		want []string
	}{
		"JavaScript with 64-bit integers": {[]string{wide + ".wasm", "x/wide:1", "--proto", wide + ".proto"},
			[]string{"wide.v1.Ask.n", "wide.v1.Tell.n"}},
		"JavaScript without": {[]string{examples + "greeter-js/greeter-js.wasm", "x/greeter:1", "--proto",
			examples + "greeter/greeter.proto"}, nil},
		"another language with such integers": {[]string{examples + "faults-c/faults-c.wasm", "x/faults:1", "--proto",
			examples + "faults-c/faults.proto"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := pushTo(t, append(c.args, "--dry-run", "-o", "json")...)
			if err != nil {
				t.Fatal(err)
			}
			var result pushed
			if err := json.Unmarshal([]byte(out), &result); err != nil {
				t.Fatal(err)
			}
			text := strings.Join(result.Warnings, "\n")
			if (text == "") != (len(c.want) == 0) {
				t.Errorf("warnings: got %q, want %q", text, c.want)
			}
			for _, field := range c.want {
				if !strings.Contains(text, field) {
					t.Errorf("warning %q does not name %s", text, field)
				}
			}
		})
	}
}
