package oci

import (
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// TestTemplatesBoot: a pod whose machine has not continued from a template boots, whatever templates there are.
func TestTemplatesBoot(t *testing.T) {
	o := &Backend{pods: map[string]*podMachine{"": {boots: true}}}
	d := machine.Definition{Memory: 1, Plug: true}
	if err := o.useTemplate(t.Context(), &sandbox.Pod{}, &d); err != nil || d.Saved != "" {
		t.Errorf("a pod that must boot: got template %q, error %v", d.Saved, err)
	}
}

// TestSessionsAreBounded: a pod has at most maxSessions sessions, and one that ends makes room for one.
func TestSessionsAreBounded(t *testing.T) {
	o := &Backend{pods: map[string]*podMachine{"p": {watching: true}}}
	var ends []func()
	for range maxSessions {
		end, err := o.beginSession("p")
		if err != nil {
			t.Fatal(err)
		}
		ends = append(ends, end)
	}
	if _, err := o.beginSession("p"); !errdefs.IsResourceExhausted(err) {
		t.Errorf("one session too many: got %v, want ResourceExhausted", err)
	}
	ends[0]()
	ends[0]() // a connection can be closed twice
	if _, err := o.beginSession("p"); err != nil {
		t.Errorf("a session after another has ended: %v", err)
	}
	if _, err := o.beginSession("p"); !errdefs.IsResourceExhausted(err) {
		t.Errorf("one session too many: got %v, want ResourceExhausted", err)
	}
}
