package scaffold

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

// TestC: the server has a method for each rpc, with the signatures of wit-bindgen's header.
func TestC(t *testing.T) {
	p, out := newBound(t, &inC, "testdata/c/shop.proto"), t.TempDir()
	if err := p.writeServer(out, "shop", read(t, "testdata/c/server.h")); err != nil {
		t.Fatal(err)
	}
	if got, want := read(t, out+"/server.c"), read(t, "testdata/c/server.c"); got != want {
		t.Errorf("server.c differs from testdata/c/server.c:\n%s", got)
	}
	if services, err := inC.services(out); err != nil || !slices.Equal(services, []string{"shop.v1.Cart"}) {
		t.Errorf("services of server.c: got %v, error %v", services, err)
	}
	if !CanBuild(out) {
		t.Error("CanBuild: got false, want true")
	}
	wantText(t, out+"/tests.yaml", "method: shop.v1.Cart/Label\n  requests: [\"\", \"\"]\n  responses: [\"0\"]\n",
		"method: shop.v1.Cart/Any\n  requests: [null]\n  responses: [null]\n")
	if _, err := writeWIT(out, p.source.Set, p.source.Services); err != nil {
		t.Fatal(err)
	}
	wantText(t, out+"/wit/shop-v1.wit", "/// Lines of C continue after a\n    for: list<string>", "/// Add adds an item.\n")
	if err := p.writeServer(out, "shop", ""); err == nil ||
		!strings.Contains(err.Error(), "wit-bindgen declares no exports_proto_shop_v1_cart_add for shop.v1.Cart/Add") {
		t.Errorf("an empty header: got error %v", err)
	}
}

// TestCRefused: what is missing is said before anything is built.
func TestCRefused(t *testing.T) {
	p, out, path := newBound(t, &inC, "testdata/c/shop.proto"), t.TempDir(), t.TempDir()
	t.Setenv("PATH", path)
	t.Setenv("WASI_SDK_PATH", "")
	t.Setenv("CC", "gcc")
	t.Setenv("XDG_CACHE_HOME", filepath.Join(path, "cache"))
	refused := func(what, want string) {
		t.Helper()
		if err := p.write(t.Context(), out, "shop"); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got error %v, want ErrUnavailable with %q", what, err, want)
		}
	}
	refused("no clang", "what is missing: clang 14 or later")
	clang := func(version, found string) {
		t.Helper()
		script := "#!/bin/sh\ncase $1 in -dumpversion) echo " + version + ";; *) echo " + found + ";; esac\n"
		if err := os.WriteFile(filepath.Join(path, "clang"), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	clang("13.0.1", "/bin/sh")
	refused("old clang", "clang is clang 13")
	clang("14.0.6", "wasm-ld")
	refused("no linker", "what is missing: wasm-ld of")
	clang("14.0.6", "/bin/sh")
	refused("no cargo", "Rust 1.88 or later with cargo in PATH")
	if left, err := os.ReadDir(filepath.Join(path, "cache", "tripod", "tools")); err != nil || len(left) != 0 {
		t.Errorf("left in the cache: %v, error %v", left, err)
	}
}
