package cli

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TestChooseContainer: a pod stands for its only container, in its newest attempt.
func TestChooseContainer(t *testing.T) {
	of := func(id, name string, attempt uint32) *runtimeapi.Container {
		return &runtimeapi.Container{Id: id, Metadata: &runtimeapi.ContainerMetadata{Name: name, Attempt: attempt}}
	}
	one := []*runtimeapi.Container{of("old", "app", 0), of("new", "app", 1)}
	two := append(one, of("other", "sidecar", 0))
	for name, c := range map[string]struct {
		name       string
		containers []*runtimeapi.Container
		want, err  string
	}{
		"only":    {"", one, "new", ""},
		"named":   {"sidecar", two, "other", ""},
		"several": {"", two, "", "app, sidecar: choose one with -c"},
		"unknown": {"x", two, "", `no container "x"; it has app, sidecar`},
		"none":    {"", nil, "", "no container"},
	} {
		got, err := choose("pod", c.name, c.containers)
		if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: got %q, %v; want %q, %q", name, got, err, c.want, c.err)
		}
	}
}

// TestWordsAfterDashes: commands as users of kubectl, docker and crictl type them.
func TestWordsAfterDashes(t *testing.T) {
	for line, want := range map[string]string{
		"sh -c ls": "sh -c ls", "-- sh -c ls": "sh -c ls", "sh -- x": "sh -- x", "-c app -- sh -c ls": "sh -c ls of app",
		"--container=app -- ls": "ls of app",
		"--":                    "error", "-c app --": "error", "-x -- ls": "error", "-c app more -- ls": "error",
	} {
		container := ""
		c := &cobra.Command{}
		containerFlag(c, &container)
		command, err := afterDashes(c, strings.Fields(line))
		got := strings.Join(command, " ")
		if container != "" {
			got += " of " + container
		}
		if err != nil {
			got = "error"
		}
		if got != want {
			t.Errorf("%q: got %q, %v; want %q", line, got, err, want)
		}
	}
}
