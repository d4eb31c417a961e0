package e2e

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/test/harness"
)

// TestWasmShippedCode: a node runs the compiled code that `tripod push --compiled` has put into an image and that a key of
// its policy has signed. With any other key it compiles. This node's compilers cannot compile the component, because
// they get too little memory, so what runs was not compiled here.
func TestWasmShippedCode(t *testing.T) {
	const name = "shipped/greeter:1"
	private, public := fleetKey(t, t.TempDir())
	example := func(file string) string { return filepath.Join(harness.Root(), "examples", "wasm", file) }
	program, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	push := exec.CommandContext(t.Context(), program, "push", example("greeter-js/greeter-js.wasm"), harness.Registry(t).Addr+"/"+name,
		"--plain-http",
		"--proto", example("greeter/greeter.proto"), "--compiled", "--key", private, "-o", "wide")
	out, err := push.CombinedOutput()
	if err != nil {
		t.Fatalf("tripod push --compiled: %v\n%s", err, out)
	}
	t.Logf("%s", out)

	address := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	policy := func(repository string) harness.Option {
		return harness.Set("wasm.compiled_layer", []map[string]any{{"repositories": []string{repository}, "keys": []string{public}}})
	}
	const smallest = 64 << 20
	d := harness.StartDaemon(t, harness.Wasm(t, "node"), harness.Set("metrics.address", address), harness.Set("wasm.compile_memory", smallest),
		policy(harness.ImagePrefix+"shipped"))
	image := harness.ImagePrefix + name
	d.Pull(t, image)
	code := waitCompilation(t, d, image)
	if code.State != "compiled" || !strings.HasPrefix(code.Key, "SHA256:") || code.LayerRefused != "" {
		t.Fatalf("code: got %+v, want that of the image", code)
	}
	c := d.RunWasm(t, &harness.PodSpec{Image: image})
	if got := dial(t, c.Pod.IP(), greeter).call(greeter+"/SayHello", `{"name":"Ada"}`); !strings.Contains(got, "Hello, Ada!") {
		t.Errorf("answer: got %s, want \"Hello, Ada!\"", got)
	}
	c.Pod.Remove()
	for command, want := range map[string]string{"events": "signed by " + code.Key, "images -o wide " + image: "shipped"} {
		out, err := tripod(t, d, strings.Fields(command)...).CombinedOutput()
		if err != nil || !strings.Contains(string(out), want) || strings.Contains(string(out), "compiling") {
			t.Errorf("tripod %s: got error %v and\n%s\nwant %q in it, and no compilation", command, err, out, want)
		}
	}
	figures := get(t, "http://"+address+"/metrics")
	if !strings.Contains(figures, `tripod_component_code_layers_total{result="used"} 1`) ||
		strings.Contains(figures, "tripod_component_compile_duration_seconds_count") {
		t.Errorf("metrics: got a compilation, or no layer:\n%s", figures)
	}

	_, other := fleetKey(t, t.TempDir())
	replaced, err := os.ReadFile(other)
	if err != nil {
		t.Fatal(err)
	}
	refused := func(why string, opts ...harness.Option) {
		t.Helper()
		d.Kill()
		d.Reconfigure(opts...)
		if err := os.RemoveAll(filepath.Join(d.Root, "wasm", "cache")); err != nil {
			t.Fatal(err)
		}
		d.Start()
		if c := waitCompilation(t, d, image); c.State != "failed" || !strings.Contains(c.LayerRefused, why) ||
			!strings.Contains(c.Reason, "memory") {
			t.Errorf("code: got %+v, want an attempt to compile because %q", c, why)
		}
	}
	refused("accepts no code", policy(harness.ImagePrefix+"ship"))
	if err := os.WriteFile(public, replaced, 0o644); err != nil {
		t.Fatal(err)
	}
	refused("not among the accepted", policy(harness.ImagePrefix+"shipped"))
}

// fleetKey makes an Ed25519 key in two files.
func fleetKey(t *testing.T, dir string) (private, public string) {
	t.Helper()
	pub, priv, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	write := func(name, kind string, der []byte, err error) string {
		t.Helper()
		file := filepath.Join(dir, name)
		if err == nil {
			err = os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		return file
	}
	der, err := x509.MarshalPKCS8PrivateKey(priv)
	private = write("fleet.key", "PRIVATE KEY", der, err)
	der, err = x509.MarshalPKIXPublicKey(pub)
	return private, write("fleet.pub", "PUBLIC KEY", der, err)
}
