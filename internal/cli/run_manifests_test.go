package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestCheckNonRoot(t *testing.T) {
	for _, c := range []struct {
		image   *runtimeapi.Image
		refused bool
	}{
		{&runtimeapi.Image{Uid: &runtimeapi.Int64Value{Value: 65534}}, false},
		{&runtimeapi.Image{Uid: &runtimeapi.Int64Value{}}, true},
		{&runtimeapi.Image{Username: "nobody"}, true},
		{&runtimeapi.Image{}, true},
	} {
		if err := checkNonRoot(c.image); errdefs.IsFailedPrecondition(err) != c.refused {
			t.Errorf("image %v: got error %v, want refused: %t", c.image, err, c.refused)
		}
	}
}

// TestRunFlags: wrong combinations and wrong files are errors before a node is needed.
func TestRunFlags(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pod.yaml")
	if err := os.WriteFile(file, []byte("apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {nodeName: node-1}"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"run"}, "needs an image"},
		{[]string{"run", "--rm", "-d", "image"}, "[detach rm]"},
		{[]string{"run", "-f", file, "image"}, "takes no arguments with -f"},
		{[]string{"run", "-f", file, "--name", "n"}, "[file name]"},
		{[]string{"run", "-f", file + ".missing"}, "no such file"},
		{[]string{"run", "-f", file}, "spec.nodeName: Forbidden"},
	} {
		out, err := runCommand(t, c.args...)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: got error %v and %q, want %q", c.args, err, out, c.want)
		}
	}
}
