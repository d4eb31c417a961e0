package cli

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// wit runs `tripod wit` and returns its output.
func wit(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	c := (&App{Stdout: &out, Stderr: io.Discard}).WITCommand()
	c.SilenceErrors, c.SilenceUsage = true, true
	c.SetArgs(args)
	err := c.ExecuteContext(t.Context())
	return out.String(), err
}

const witProto = `syntax = "proto3";
package shop.v1;
import "common.proto";
service Cart { rpc Add(common.Item) returns (common.Item); }
service Till { rpc Pay(common.Item) returns (stream common.Item); }
`

func witFiles(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"shop.proto":       witProto,
		"lib/common.proto": "syntax = \"proto3\";\npackage common;\nmessage Item { string name = 1; }\n",
		"empty.proto":      "syntax = \"proto3\";\nmessage M {}\n",
	} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestWITGenPrints(t *testing.T) {
	dir := witFiles(t)
	out, err := wit(t, "gen", "-I", dir, "-I", dir+"/lib", "--service", "shop.v1.Till", dir+"/shop.proto")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"package proto:shop-v1;", "interface till {", "world server {", "package tripod:grpc@0.1.0 {"} {
		if !strings.Contains(out, want) {
			t.Errorf("output does not contain %q:\n%s", want, out)
		}
	}
	if strings.Contains(out, "cart") {
		t.Errorf("output contains another service:\n%s", out)
	}
}

// TestWITGenWrites: wit gen writes and rewrites the directory, but does not overwrite changed files.
func TestWITGenWrites(t *testing.T) {
	dir := witFiles(t)
	args := []string{"gen", "-I", dir + "," + dir + "/lib", "-o", dir + "/wit", dir + "/shop.proto"}
	for range 2 {
		if _, err := wit(t, args...); err != nil {
			t.Fatal(err)
		}
	}
	root := filepath.Join(dir, "wit/shop-v1.wit")
	text, err := os.ReadFile(root)
	if err != nil || !strings.Contains(string(text), "export cart;\n  export till;\n") {
		t.Errorf("root document: got error %v and\n%s\nwant both services exported", err, text)
	}
	if _, err := os.Stat(filepath.Join(dir, "wit/deps/tripod-grpc/grpc.wit")); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(root, []byte("mine"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := wit(t, args...); err == nil || !strings.Contains(err.Error(), "--force") {
		t.Errorf("wit gen over a changed file: got error %v, want one with --force", err)
	}
	if _, err := wit(t, append(args, "--force")...); err != nil {
		t.Error(err)
	}
	if again, err := os.ReadFile(root); err != nil || string(again) != string(text) {
		t.Errorf("root document after --force: got error %v and\n%s\nwant\n%s", err, again, text)
	}
}

func TestWITGenRefuses(t *testing.T) {
	dir := witFiles(t)
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{dir + "/empty.proto"}, "no service in"},
		{[]string{dir + "/shop.proto"}, "common.proto"},
		{[]string{"-I", dir, "-I", dir + "/lib", "--service", "shop.v1.None", dir + "/shop.proto"}, `no service "shop.v1.None"`},
		{[]string{dir + "/nothing.proto"}, "nothing.proto"},
		{nil, "requires at least 1 arg"},
	} {
		if _, err := wit(t, append([]string{"gen"}, tc.args...)...); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("wit gen %q: got error %v, want one with %q", tc.args, err, tc.want)
		}
	}
}
