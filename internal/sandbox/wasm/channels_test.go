package wasm

import (
	"bufio"
	"io"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// TestChannels: a container's channels get to the worker with its start, and a connection to them after a restart of the
// daemon, too; it ends with the container.
func TestChannels(t *testing.T) {
	r := newRig(t)
	p := r.pod("channels")
	c := r.container(p, "world=command")
	c.Config.Annotations = map[string]string{sandbox.AnnotationChannels: `[{"name":"in","topic":"a/#","flags":1}]`}
	r.must(r.Validate(p, c))
	_, err := r.CreateContainer(r.ctx(), p, c)
	r.must(err)
	r.known[p.ID] = sandbox.Known{Pod: p, Containers: []*sandbox.Container{c}}
	if _, _, err := r.Channels(r.ctx(), p, c); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("before the start: %v", err)
	}
	r.must(r.StartContainer(r.ctx(), p, c))
	r.abandon()
	conn, group, err := r.Channels(r.ctx(), p, c)
	r.must(err)
	defer conn.Close()
	r.must(conn.SetReadDeadline(time.Now().Add(30 * time.Second)))
	in := bufio.NewReader(conn)
	if line, err := in.ReadString('\n'); line != "in a/# 1\n" || group == "" {
		t.Errorf("the worker, group %q, knows %q, %v", group, line, err)
	}
	r.must(r.StopContainer(r.ctx(), p, c, 0))
	if _, err := in.ReadByte(); err != io.EOF {
		t.Errorf("after the end: %v", err)
	}
	if _, _, err := r.Channels(r.ctx(), p, c); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("after the end: %v", err)
	}
}

// TestModuleIsNoServer: a module has the node's network, and no business with its ports.
func TestModuleIsNoServer(t *testing.T) {
	r := newRig(t)
	p := r.pod("server")
	c := r.container(p, "world=http")
	c.Config.Annotations = map[string]string{sandbox.AnnotationEdge + "module": "uuid"}
	_, err := r.CreateContainer(r.ctx(), p, c)
	r.must(err)
	r.known[p.ID] = sandbox.Known{Pod: p, Containers: []*sandbox.Container{c}}
	if err := r.StartContainer(r.ctx(), p, c); !errdefs.IsInvalidArgument(err) {
		t.Errorf("%v", err)
	}
	if at := r.ports.where("tcp 80"); at != "" {
		t.Errorf("a port is open at %s", at)
	}
}

func TestNoChannels(t *testing.T) {
	r := newRig(t)
	p, c := r.run("none", "world=command")
	if _, _, err := r.Channels(r.ctx(), p, c); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("%v", err)
	}
	bad := r.container(p, "world=command")
	bad.Config.Annotations = map[string]string{sandbox.AnnotationChannels: "{"}
	if err := r.Validate(p, bad); !errdefs.IsInvalidArgument(err) {
		t.Errorf("%v", err)
	}
}
