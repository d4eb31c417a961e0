package wasm

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/image"
)

// TestClaims: a component in a root file system runs unless the container names another program there.
func TestClaims(t *testing.T) {
	for name, c := range map[string]struct {
		component *image.Component
		command   []string
		want      bool
	}{
		"no component":       {nil, []string{"/app.wasm"}, false},
		"no command":         {&image.Component{Layout: image.LayoutRootfs}, nil, true},
		"the component":      {&image.Component{Layout: image.LayoutRootfs}, []string{"/app.wasm", "-v"}, true},
		"another program":    {&image.Component{Layout: image.LayoutRootfs}, []string{"/bin/sh", "app.wasm"}, false},
		"an artifact's argv": {&image.Component{Layout: image.LayoutCNCF}, []string{"sh"}, true},
	} {
		if got := Claims(&runtimeapi.ContainerConfig{Command: c.command}, image.Image{Component: c.component}); got != c.want {
			t.Errorf("%s: Claims = %t, want %t", name, got, c.want)
		}
	}
}

// TestCheckImage checks that the image must be the component that the pod's labels name.
func TestCheckImage(t *testing.T) {
	wanted := componentName{"example.com", "foo.Bar", "1.2.3+build"}
	says := func(domain, server, version string) map[string]string {
		return map[string]string{"p/domain": domain, "p/server": server, "p/version": version}
	}
	for name, c := range map[string]struct {
		annotations map[string]string
		refs        []string
		ok          bool
	}{
		"the image says so":              {says("example.com", "foo.Bar", "1.2.3+build"), nil, true},
		"… as a label is written":        {says("example.com", "foo.Bar", "1.2.3_build"), nil, true},
		"the image says another version": {says("example.com", "foo.Bar", "1.2.4"), []string{"r.example/example.com/foo.bar:1.2.3_build"}, false},
		"half a name":                    {map[string]string{"p/domain": "example.com"}, nil, false},
		"the reference spells it":        {nil, []string{"r.example:5000/x/example.com/foo.bar:1.2.3_build"}, true},
		"one of the references does":     {nil, []string{"r.example/other:1", "r.example/example.com/foo.bar:1.2.3_build"}, true},
		"a longer last part":             {nil, []string{"r.example/notexample.com/foo.bar:1.2.3_build"}, false},
		"another tag":                    {nil, []string{"r.example/example.com/foo.bar:1.2.3"}, false},
		"no tag":                         {nil, []string{"r.example/example.com/foo.bar"}, false},
		"no reference":                   {nil, []string{"%%%"}, false},
		"nothing":                        {nil, nil, false},
	} {
		err := checkImage(wanted, c.annotations, "p/", c.refs)
		if c.ok && err != nil || !c.ok && (!errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), wanted.String())) {
			t.Errorf("%s: checkImage = %v, want ok %v", name, err, c.ok)
		}
	}
}

func TestDerive(t *testing.T) {
	for ref, want := range map[string]string{
		"registry.example.com/team/greeter:1.2.3":        "registry.example.com:greeter@1.2.3",
		"registry.example.com:5000/greeter:v1.2":         "registry.example.com:greeter@1.2.0",
		"registry.example.com/a/b/c/Foo.Bar:1":           "",
		"registry.example.com/foo.bar:1.0.0-rc.1_build5": "registry.example.com:foo.bar@1.0.0-rc.1+build5",
		"greeter": "docker.io:greeter@0.0.0-latest",
		"localhost:5000/my__app-x:stable-20260101": "localhost:my-app-x@0.0.0-stable-20260101",
		"r.example/x@sha256:" + hashOf("x"):        "r.example:x@0.0.0-sha256-" + hashOf("x")[:12],
		"r.example/x:" + strings.Repeat("9", 80):   "r.example:x@0.0.0-latest",
	} {
		if got := derive([]string{ref}).String(); got != want {
			t.Errorf("derive(%q) = %q, want %q", ref, got, want)
		}
	}
	if got := derive([]string{"::", "r.example/x:1.0.0"}).String(); got != "r.example:x@1.0.0" {
		t.Errorf("derive with an invalid first reference = %q, want the second reference's name", got)
	}
}

func TestKeys(t *testing.T) {
	id := "example.com:foo.Bar@1.2.3#0"
	if key := keyOf(id); !hexID().MatchString(key) || key == keyOf("example.com:foo.Bar@1.2.3#1") {
		t.Errorf("keyOf(%q) = %s, want a unique hexadecimal key", id, key)
	}
	if hex := hashOf("x"); keyOf(hex) != hex {
		t.Error("a hexadecimal ID is not its own key")
	}
}
