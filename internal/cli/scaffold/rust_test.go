package scaffold

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

// TestRust: the server implements the traits of wit-bindgen for all services, whatever their names.
func TestRust(t *testing.T) {
	p, out := newBound(t, &inRust, "testdata/rust/shop.proto", "testdata/rust/old.proto"), t.TempDir()
	bindings := read(t, "testdata/rust/server.rs")
	if err := p.writeServer(out, "3d.shop", bindings); err != nil {
		t.Fatal(err)
	}
	wantText(t, out+"/Cargo.toml", "name = \"server-3d-shop\"\n", "edition = \"2021\"", "\n[workspace]\n")
	wantText(t, out+"/tests.yaml", "method: shop.type.Cart/Repeat\n  requests: [\"0\"]\n  responses: [\"0\"]\n")
	if err := p.writeServer(out, "shop", bindings); err != nil {
		t.Fatal(err)
	}
	wantText(t, out+"/Cargo.toml", "name = \"shop\"\n")
	if got, want := read(t, out+"/src/lib.rs"), read(t, "testdata/rust/lib.rs"); got != want {
		t.Errorf("src/lib.rs differs from testdata/rust/lib.rs:\n%s", got)
	}
	if services, err := inRust.services(out); err != nil || !slices.Equal(services, p.source.Services) || len(services) != 4 {
		t.Errorf("services of src/lib.rs: got %v, error %v", services, err)
	}
	if !CanBuild(out) || CanBuild(filepath.Join(out, "src")) {
		t.Errorf("CanBuild: got %v for the directory and %v for another one, want true and false", CanBuild(out),
			CanBuild(filepath.Join(out, "src")))
	}
	for without, want := range map[string]string{
		"cart::__export_proto_shop_v1_cart_cabi!": "wit-bindgen exports no proto:shop-v1/cart",
		"fn add(":                    "wit-bindgen declares no function for shop.v1.Cart/Add",
		"request: Thing,":            "wit-bindgen declares the function for shop.v1.Cart/Add with 1 parameters",
		"[method]option-writer.send": "wit-bindgen imports no option-writer for shop.type.Cart/Talk",
		"message: &Option":           "wit-bindgen declares no send of option-writer for shop.type.Cart/Talk",
	} {
		if err := p.writeServer(out, "shop", strings.ReplaceAll(bindings, without, "")); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("without %s: got error %v, want %q", without, err, want)
		}
	}
}

// TestFindRust: the first compiler with the standard library of a target is used, with the cargo beside it.
func TestFindRust(t *testing.T) {
	path := t.TempDir()
	t.Setenv("PATH", path)
	t.Setenv("RUSTC", filepath.Join(path, "mine"))
	names := rustCompilers()
	if want := []string{filepath.Join(path, "mine"), "rustc", "/usr/bin/rustc"}; !slices.Equal(names, want) {
		t.Errorf("compilers: got %v, want %v", names, want)
	}
	names[2] = filepath.Join(path, "usr", "rustc") // the host's may have all
	compiler := func(name, targets string) string {
		t.Helper()
		file, lib := filepath.Join(path, name), filepath.Join(path, name+"-lib")
		for _, dir := range []string{filepath.Dir(file), lib} {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		script := "#!/bin/sh\ncase $4 in " + targets + ") echo " + lib + ";; *) echo 'no such target' >&2; exit 1;; esac\n"
		if err := os.WriteFile(file, []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
		return lib
	}
	refused := func(what string) {
		t.Helper()
		if _, err := findRust(t.Context(), path, names); !errdefs.IsUnavailable(err) ||
			!strings.Contains(err.Error(), "rustup target add wasm32-wasip1") {
			t.Errorf("%s: got error %v, want ErrUnavailable with what to install", what, err)
		}
	}
	found := func(compiler, target, cargo string) {
		t.Helper()
		if r, err := findRust(t.Context(), path, names); err != nil || r.compiler != filepath.Join(path, compiler) || r.target != target ||
			r.cargo.Name() != cargo {
			t.Errorf("got %+v, error %v; want %s for %s with %s", r, err, compiler, target, cargo)
		}
	}
	std := func(lib string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(lib, "libstd-0.rlib"), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	refused("no rustc")
	lib := compiler("rustc", "wasm32-wasip1")
	refused("no standard library")
	old := compiler("usr/rustc", "wasm32-wasi")
	std(old)
	found("usr/rustc", "wasm32-wasi", "cargo")
	if err := os.WriteFile(filepath.Join(path, "usr", "cargo"), nil, 0o755); err != nil {
		t.Fatal(err)
	}
	found("usr/rustc", "wasm32-wasi", filepath.Join(path, "usr", "cargo"))
	std(lib)
	found("rustc", "wasm32-wasip1", "cargo")
	std(compiler("mine", "wasm32-wasi|wasm32-wasip1"))
	found("mine", "wasm32-wasip1", "cargo")
}
