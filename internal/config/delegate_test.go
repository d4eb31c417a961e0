package config

import (
	"strings"
	"testing"
	"time"
)

func parseDelegates(t *testing.T, document string) (*Config, error) {
	t.Helper()
	c, err := Parse([]byte(document), "f.toml")
	if err != nil {
		t.Fatal(err)
	}
	return c, c.Complete()
}

func TestDelegateDefaults(t *testing.T) {
	c, err := parseDelegates(t, `
[[delegate]]
name = "containerd"
endpoint = "unix:///run/containerd/containerd.sock"
handlers = ["", "runc"]
[[delegate]]
name = "crio"
endpoint = "/run/crio/crio.sock"
image_endpoint = "/run/crio/images.sock"
annotations = ["example.com/runtime=crio", "example.com/old"]
timeout = "5s"
`)
	if err != nil {
		t.Fatal(err)
	}
	d := c.Delegates[0]
	if d.Endpoint != "/run/containerd/containerd.sock" || d.ImageEndpoint != d.Endpoint || time.Duration(d.Timeout) != 2*time.Second ||
		time.Duration(d.SnapshotMaxAge) != 5*time.Minute {
		t.Errorf("first delegate: got %+v, want the defaults", d)
	}
	if d := c.Delegates[1]; d.ImageEndpoint != "/run/crio/images.sock" || time.Duration(d.Timeout) != 5*time.Second {
		t.Errorf("second delegate: got %+v, want its own values", d)
	}
	if _, ok := c.Node.HandlerAliases["runc"]; ok || c.Node.HandlerAliases["crun"] != "linux" {
		t.Errorf("aliases: got %v, want no alias with the name of a delegate's handler", c.Node.HandlerAliases)
	}
}

func TestDelegateErrors(t *testing.T) {
	for name, c := range map[string]struct{ document, want string }{
		"no name":              {`endpoint = "/s"` + "\nhandlers = [\"a\"]", `delegate[0].name: "" is not a DNS label`},
		"no endpoint":          {`name = "a"` + "\nhandlers = [\"a\"]", "delegate[0].endpoint"},
		"nothing to forward":   {"name = \"a\"\nendpoint = \"/s\"", "nothing is forwarded to it"},
		"own socket":           {"name = \"a\"\nendpoint = \"/run/tripod/tripod.sock\"\nhandlers = [\"a\"]", "the daemon's own socket"},
		"handler of this node": {"name = \"a\"\nendpoint = \"/s\"\nhandlers = [\"wasm\"]", `"wasm" is a handler of this node`},
		"bad handler":          {"name = \"a\"\nendpoint = \"/s\"\nhandlers = [\"A_b\"]", `"A_b" is not a DNS label`},
		"handler of two":       {"name = \"a\"\nendpoint = \"/s\"\nhandlers = [\"x\"]\n[[delegate]]\nname = \"b\"\nendpoint = \"/t\"\nhandlers = [\"x\"]", `"x" is already a handler of delegate "a"`},
		"same names":           {"name = \"a\"\nendpoint = \"/s\"\nhandlers = [\"x\"]\n[[delegate]]\nname = \"a\"\nendpoint = \"/t\"\nhandlers = [\"y\"]", "the name of two delegates"},
		"empty prefix":         {"name = \"a\"\nendpoint = \"/s\"\nimage_prefixes = [\"\"]", "would select all images"},
		"annotation":           {"name = \"a\"\nendpoint = \"/s\"\nannotations = [\"=x\"]", "neither KEY nor KEY=VALUE"},
		"negative age":         {"name = \"a\"\nendpoint = \"/s\"\nhandlers = [\"a\"]\nsnapshot_max_age = \"-1s\"", "snapshot_max_age"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := parseDelegates(t, "[[delegate]]\n"+c.document); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got error %v, want one with %q", err, c.want)
			}
		})
	}
}
