package node

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

// componentNamed parses domain:server@version by means of labels, as ComponentFromLabels expects them.
func componentNamed(name string) (Component, error) {
	domain, rest, _ := strings.Cut(name, ":")
	server, version, _ := strings.Cut(rest, "@")
	labels := map[string]string{"domain": domain, "server": server, "version": version}
	c, _, err := ComponentFromLabels(labels, "")
	return c, err
}

func TestComponentNames(t *testing.T) {
	for _, name := range []string{
		"example.com:foo.Bar@1.2.3",
		"localhost:echo@0.0.1-rc.1",
		"0123456789abcdef0123456789abcdef:foo.Bar@1.0.0",
		"a.b-c.io:my-server@1.2.3+build.5",
		"example.com:_Private.x1@10.20.30",
	} {
		c, err := componentNamed(name)
		if err != nil {
			t.Errorf("component %q: %v", name, err)
		} else if c.String() != name {
			t.Errorf("component %q: String() = %q", name, c)
		}
	}
	for _, name := range []string{
		"", "example.com", "example.com:foo", "example.com@1.2.3", ":foo@1.2.3", "example.com:@1.2.3",
		"Example.com:foo@1.2.3", "0123456789ABCDEF0123456789ABCDEF:foo@1.0.0", "ex_ample.com:foo@1.2.3", "-a.com:foo@1.2.3",
		"example.com:foo..Bar@1.2.3", "example.com:Foo-Bar@1.2.3", "example.com:1foo.Bar@1.2.3",
		"example.com:" + strings.Repeat("x", 64) + "@1.2.3",
		"example.com:foo@1.2", "example.com:foo@v1.2.3", "example.com:foo@01.2.3", "example.com:foo@1.2.3 ", "example.com:foo@1.2.3-01",
		strings.Repeat("a.", 127) + "com:foo@1.2.3", "example.com:foo@1.2.3#0",
	} {
		if c, err := componentNamed(name); !errdefs.IsInvalidArgument(err) {
			t.Errorf("component %q: got %v, %v; want invalid argument", name, c, err)
		}
	}
}

func TestInstanceIDsHaveOneSpelling(t *testing.T) {
	c := Component{"example.com", "foo.Bar", "1.2.3"}
	for n, want := range map[uint64]string{0: "example.com:foo.Bar@1.2.3#0", 255: "example.com:foo.Bar@1.2.3#ff"} {
		if got := c.Instance(n); got != want {
			t.Errorf("Instance(%d) = %q, want %q", n, got, want)
		}
	}
}

func TestComponentFromLabels(t *testing.T) {
	const prefix = "vimana.host/"
	labels := func(kv ...string) map[string]string {
		m := map[string]string{"app": "x"}
		for i := 0; i < len(kv); i += 2 {
			m[prefix+kv[i]] = kv[i+1]
		}
		return m
	}
	c, ok, err := ComponentFromLabels(labels("domain", "example.com", "server", "foo.Bar", "version", "1.2.3-a_b5"), prefix)
	if err != nil || !ok || c.String() != "example.com:foo.Bar@1.2.3-a+b5" {
		t.Errorf("ComponentFromLabels = %v, %v, %v; want example.com:foo.Bar@1.2.3-a+b5", c, ok, err)
	}
	if _, ok, err := ComponentFromLabels(labels(), prefix); ok || err != nil {
		t.Errorf("ComponentFromLabels without labels: got %v, %v; want false without an error", ok, err)
	}
	if _, ok, err := ComponentFromLabels(labels("port", "80"), prefix); ok || err != nil {
		t.Errorf("ComponentFromLabels with other labels: got %v, %v; want false without an error", ok, err)
	}
	if _, _, err := ComponentFromLabels(labels("domain", "example.com"), prefix); !errdefs.IsInvalidArgument(err) {
		t.Errorf("ComponentFromLabels with a domain only: got error %v, want invalid argument", err)
	}
}

// FuzzComponent: every accepted name is its own canonical spelling.
func FuzzComponent(f *testing.F) {
	f.Add("example.com:foo.Bar@1.2.3")
	f.Add("0123456789abcdef0123456789abcdef:a@0.0.0-x.1+y")
	f.Fuzz(func(t *testing.T, name string) {
		if strings.Contains(name, "_") {
			return // it stands for + in a label
		}
		c, err := componentNamed(name)
		if err == nil && c.String() != name {
			t.Errorf("component %q: String() = %q", name, c)
		}
	})
}
