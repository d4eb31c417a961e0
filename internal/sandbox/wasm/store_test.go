package wasm

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// TestStoreURL checks where the address of the store comes from, and that no error shows it.
func TestStoreURL(t *testing.T) {
	b := &Backend{}
	b.cfg.LabelPrefix = "p/"
	user := workerapi.Loaded{Imports: []string{"wasi:keyvalue/store@0.2.0-draft#open"}}
	env := []string{"GOOD=redis://:secret@redis", "BAD=http://secret@redis"}
	for _, c := range []struct {
		annotation, want, words string
		loaded                  workerapi.Loaded
	}{
		{"", "", "", user},
		{"redis://redis:1/2", "redis://redis:1/2", "", user},
		{"$(GOOD)", "redis://:secret@redis", "", user},
		{"$(BAD)", "", "annotation p/keyvalue: the variable BAD: not a URL", user},
		{"$(MISSING)", "", "the container has no variable MISSING", user},
		{"$(MISSING)", "", "", workerapi.Loaded{Imports: []string{"wasi:io/poll@0.2.0#poll"}}},
		{"http://secret@redis", "", "the scheme is neither redis nor rediss", user},
		{"redis://$(GOOD)", "", "", workerapi.Loaded{}},
	} {
		pod := &runtimeapi.PodSandboxConfig{Annotations: map[string]string{"p/keyvalue": c.annotation}}
		o, err := parseOptions(pod, "c", "p/")
		got := ""
		if err == nil {
			got, err = b.storeURL(o, c.loaded, env)
		}
		if got != c.want || (err == nil) != (c.words == "") {
			t.Errorf("annotation %q: %q, %v; want %q, %q", c.annotation, got, err, c.want, c.words)
		}
		if err != nil && (!errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), c.words) || strings.Contains(err.Error(), "secret")) {
			t.Errorf("annotation %q: %v, want ErrInvalidArgument with %q", c.annotation, err, c.words)
		}
	}
}
