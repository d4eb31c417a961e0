package wasm

import (
	"bufio"
	"io"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/keys"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// TestChannels checks that the worker gets a container's channels at its start, and that their connection can be opened
// after a restart of the daemon and ends with the container.
func TestChannels(t *testing.T) {
	r := newRig(t)
	p := r.pod("channels")
	c := r.container(p, "world=command")
	c.Config.Annotations = map[string]string{keys.EdgeModule: "uuid"}
	c.Channels = []channel.Channel{{Name: "in", Topic: "a/#", Flags: channel.Read}}
	r.must(r.Validate(p, c))
	_, err := r.CreateContainer(r.ctx(), p, c)
	r.must(err)
	r.known[p.ID] = sandbox.Known{Pod: p, Containers: []*sandbox.Container{c}}
	if _, _, err := r.Channels(r.ctx(), p, c); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Channels before the start = %v, want ErrFailedPrecondition", err)
	}
	r.must(r.StartContainer(r.ctx(), p, c))
	r.restartDaemon()
	conn, group, err := r.Channels(r.ctx(), p, c)
	r.must(err)
	defer conn.Close()
	r.must(conn.SetReadDeadline(time.Now().Add(30 * time.Second)))
	in := bufio.NewReader(conn)
	if line, err := in.ReadString('\n'); line != "in a/# 1\n" || group == "" {
		t.Errorf("first line = %q, %v in group %q; want in a/# 1", line, err, group)
	}
	r.must(r.StopContainer(r.ctx(), p, c, 0))
	if _, err := in.ReadByte(); err != io.EOF {
		t.Errorf("read after the exit = %v, want EOF", err)
	}
	if _, _, err := r.Channels(r.ctx(), p, c); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Channels after the exit = %v, want ErrFailedPrecondition", err)
	}
}

// TestModuleIsNoServer checks that a module cannot be a server, because it would open ports in the node's network.
func TestModuleIsNoServer(t *testing.T) {
	r := newRig(t)
	p := r.pod("server")
	c := r.container(p, "world=http")
	c.Config.Annotations = map[string]string{keys.EdgeModule: "uuid"}
	_, err := r.CreateContainer(r.ctx(), p, c)
	r.must(err)
	r.known[p.ID] = sandbox.Known{Pod: p, Containers: []*sandbox.Container{c}}
	if err := r.StartContainer(r.ctx(), p, c); !errdefs.IsInvalidArgument(err) {
		t.Errorf("StartContainer = %v, want ErrInvalidArgument", err)
	}
	if at := r.ports.address("tcp 80"); at != "" {
		t.Errorf("port 80 is open at %s, want no port", at)
	}
}

func TestNoChannels(t *testing.T) {
	r := newRig(t)
	p, c := r.run("none", "world=command")
	if _, _, err := r.Channels(r.ctx(), p, c); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Channels = %v, want ErrFailedPrecondition", err)
	}
}
