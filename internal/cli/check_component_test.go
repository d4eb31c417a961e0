package cli

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// checkOf runs `tripod check` on a component, and returns what it printed to both streams.
func checkOf(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	var out, errs bytes.Buffer
	app := &App{Stdout: &out, Stderr: &errs}
	var k ComponentCheck
	c := &cobra.Command{Use: "check", SilenceErrors: true, SilenceUsage: true, Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error { return k.Run(c.Context(), app, args[0]) }}
	k.Flags(c.Flags())
	app.OutputFlag(c)
	c.SetArgs(append([]string{"--docker-config", "", "--hosts-dir", t.TempDir()}, args...))
	err = c.ExecuteContext(t.Context())
	return strings.TrimSpace(out.String()), strings.TrimSpace(errs.String()), err
}

// TestCheckComponent: the line names the world, the path, why there are no snapshots, and the optional interfaces. push
// prints the same, and check finds the same in the pushed image without other flags.
func TestCheckComponent(t *testing.T) {
	host, _ := newRegistry(t)
	greeter := []string{"--proto", examples + "greeter/greeter.proto"}
	for name, c := range map[string]struct {
		args []string
		want []string
	}{
		"greeter-c": {greeter,
			[]string{"grpc (greet.v1.Greeter)", "core path", "no snapshots (the guest does not export tripod:grpc/snapshot",
				"no optional interfaces"}},
		"greeter-js":   {greeter, []string{"core path", "begin from a snapshot of their pod"}},
		"command-go":   {nil, []string{"command; core path", "no snapshots (a command runs once)"}},
		"hello-http-c": {nil, []string{"http; core path"}},
		"fetch-c":      {nil, []string{"optional interfaces: wasi:http/outgoing-handler@0.2"}},
		"sockets-c":    {nil, []string{"optional interfaces: wasi:sockets"}},
		"cloud-c":      {nil, []string{"optional interfaces: wasi:config/store@0.2.0-rc.1, wasi:keyvalue/atomics@0.2.0-draft2"}},
	} {
		t.Run(name, func(t *testing.T) {
			file := examples + name + "/" + name + ".wasm"
			line, _, err := checkOf(t, append(c.args, file)...)
			if err != nil || strings.Count(line, "\n") != 0 {
				t.Fatalf("check printed %q, %v; want one line", line, err)
			}
			for _, want := range c.want {
				if !strings.Contains(line, want) {
					t.Errorf("check printed %q, want %q", line, want)
				}
			}
			ref := host + "/" + name + ":1"
			document, err := pushTo(t, append(c.args, file, ref, "--plain-http", "-o", "json")...)
			if err != nil {
				t.Fatal(err)
			}
			var sent pushed
			if err := json.Unmarshal([]byte(document), &sent); err != nil || !strings.HasSuffix(line, sent.Route.String()) {
				t.Errorf("push printed %s, %v; want what check said: %s", document, err, line)
			}
			remote, _, err := checkOf(t, ref, "--plain-http")
			if err != nil || remote != ref+strings.TrimPrefix(line, file) {
				t.Errorf("check of the image printed %q, %v; want what it said of the file", remote, err)
			}
		})
	}
}

// TestCheckService: an image that serves some of the services in its descriptors is checked for these.
func TestCheckService(t *testing.T) {
	host, _ := newRegistry(t)
	two := filepath.Join(t.TempDir(), "two.proto")
	text := `syntax = "proto3"; package greet.v1; import "greeter.proto"; service Other { rpc Do(HelloRequest) returns (HelloReply); }`
	if err := os.WriteFile(two, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	ref := host + "/two:1"
	if _, err := pushTo(t, examples+"greeter-c/greeter-c.wasm", ref, "--plain-http", "-I", filepath.Dir(two), "-I", examples+"greeter",
		"--proto", two, "--service", "greet.v1.Greeter"); err != nil {
		t.Fatal(err)
	}
	if line, _, err := checkOf(t, ref, "--plain-http"); err != nil || !strings.Contains(line, "grpc (greet.v1.Greeter);") {
		t.Errorf("check printed %q, %v; want the service greet.v1.Greeter", line, err)
	}
}

// TestCheckRefuses: what no node runs, and what is not there.
func TestCheckRefuses(t *testing.T) {
	host, _ := newRegistry(t)
	for word, args := range map[string][]string{
		"no descriptors name":                    {examples + "greeter-c/greeter-c.wasm"},
		"does not export proto:greet-v1/greeter": {examples + "faults-c/faults-c.wasm", "--proto", examples + "greeter/greeter.proto"},
		"no such file":                           {"none.wasm"},
		"not WebAssembly":                        {examples + "greeter/greeter.proto"},
		"not found":                              {host + "/none:1", "--plain-http"},
		"timeout":                                {examples + "greeter-c/greeter-c.wasm", "--timeout", "soon"},
	} {
		if out, _, err := checkOf(t, args...); err == nil || out != "" || !strings.Contains(err.Error(), word) {
			t.Errorf("check %v printed %q, %v; want an error with %q", args, out, err, word)
		}
	}
}

// TestCheckRandom: a generator that was seeded at the build gives all requests the same values.
func TestCheckRandom(t *testing.T) {
	binary, err := os.ReadFile(examples + "greeter-js/greeter-js.wasm")
	if err != nil {
		t.Fatal(err)
	}
	// A custom section with what the program's text leaves in its memory.
	file := filepath.Join(t.TempDir(), "random.wasm")
	if err := os.WriteFile(file, append(binary, "\x00\x0d\x01xMath.random"...), 0o600); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]bool{file: true, examples + "greeter-js/greeter-js.wasm": false} {
		_, warnings, err := checkOf(t, file, "--proto", examples+"greeter/greeter.proto")
		if err != nil || strings.Contains(warnings, "Math.random") != want {
			t.Errorf("check %s warned %q, %v; want a warning about Math.random: %v", file, warnings, err, want)
		}
	}
	var stderr bytes.Buffer
	app := &App{Stdout: io.Discard, Stderr: &stderr}
	c := app.PushCommand()
	c.SetArgs([]string{file, "localhost:1/x:1", "--dry-run", "--docker-config", "", "--proto", examples + "greeter/greeter.proto"})
	if err := c.ExecuteContext(t.Context()); err != nil || !strings.Contains(stderr.String(), "Math.random") ||
		!strings.Contains(stderr.String(), "tripod push: core path") {
		t.Errorf("push printed %q, %v; want the warning and the path", stderr.String(), err)
	}
}
