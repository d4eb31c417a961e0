package unitpods

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/keys"
	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/sandbox"
)

const uuid = "33333333-0000-4000-8000-000000000001"

func TestModuleIsAPodOfTheNode(t *testing.T) {
	r := newRig(t)
	data := filepath.Join(r.dir, "data")
	r.must(os.MkdirAll(filepath.Join(data, "in"), 0o755))
	p := r.create(5, uuid, `"name":"My Module"`, `"args":{"argv":["x"],"env":["A=1","B=x=y"]}`, `"dirs":["`+data+`/in::/input"]`,
		`"resources":{"memory":"4Mi","cpu":0.5,"peripheral":"p"}`,
		`"channels":[{"mode":"r","topic":"$SL/in"},{"mode":"w","topic":"app/in","qos":1}]`)
	c := p.Container(p.ID)
	if c.State != node.Running || p.Handler != "wasm" {
		t.Fatalf("the pod is %+v", p)
	}
	meta := p.Config.Metadata
	if meta.Namespace != "edge" || meta.Name != "my-module-33333333" || meta.Uid != uuid || p.Config.Labels[keys.EdgeModule] != uuid ||
		p.Config.Labels[keys.EdgeRuntime] != r.UUID {
		t.Errorf("pod %v, labels %v", meta, p.Config.Labels)
	}
	if p.Config.Linux.SecurityContext.NamespaceOptions.Network != runtimeapi.NamespaceMode_NODE {
		t.Error("the pod has a network of its own")
	}
	var env []string
	for _, e := range c.Config.Envs {
		env = append(env, e.Key+"="+string(e.Value))
	}
	if strings.Join(c.Config.Command, " ") != "m.wasm x" || strings.Join(env, " ") != "A=1 B=x=y" {
		t.Errorf("command %v, environment %v", c.Config.Command, env)
	}
	if m := c.Config.Mounts; len(m) != 1 || m[0].HostPath != filepath.Join(data, "in") || m[0].ContainerPath != "/input" {
		t.Errorf("mounts %v", m)
	}
	if res := c.Config.Linux.Resources; res.MemoryLimitInBytes != 4<<20 || res.CpuQuota != 50_000 || res.CpuPeriod != 100_000 {
		t.Errorf("resources %v", res)
	}
	channels, err := channel.Parse(c.Config.Annotations[keys.EdgeChannels])
	r.must(err)
	want := []channel.Channel{{Name: "in", Topic: "realm/in/" + uuid, Flags: 1}, {Name: "in-2", Topic: "app/in", Flags: 6}}
	if fmt.Sprint(channels) != fmt.Sprint(want) {
		t.Errorf("channels %v, want %v", channels, want)
	}
	if r.Group(5) != "" && r.Group(5) != "group" || r.Group(6) != "" {
		t.Errorf("groups %q, %q", r.Group(5), r.Group(6))
	}
}

func TestModuleEnds(t *testing.T) {
	r := newRig(t)
	p := r.create(0, uuid)
	r.guests.Exit(p.ID, 3)
	r.wantExited(0, 3, "exited")
	r.cleanup(0, uuid)
	if pods := r.node.Pods(); len(pods) != 0 {
		t.Errorf("pods are left: %v, want none", pods)
	}
	if left, _ := filepath.Glob(filepath.Join(r.config.LogDir, "*", "*")); len(left) != 0 {
		t.Errorf("files are left: %v, want none", left)
	}
	r.create(0, uuid) // index and uuid are free
}

func TestModuleIsDeleted(t *testing.T) {
	r := newRig(t)
	r.create(7, uuid)
	r.must(r.Delete(t.Context(), 7, uuid))
	r.wantExited(7, 137, "killed")
	r.must(r.node.StopSandbox(t.Context(), r.node.Pods()[0].ID))
	r.must(r.Delete(t.Context(), 7, uuid)) // its pod takes no such order any more
	r.cleanup(7, uuid)
	r.cleanup(7, uuid)
	if err := r.Delete(t.Context(), 7, uuid); !errdefs.IsNotFound(err) {
		t.Errorf("deleted twice: %v", err)
	}
}

// TestStop: all modules end; stopping an unknown one is an error.
func TestStop(t *testing.T) {
	r := newRig(t)
	for i := range 3 {
		r.must(r.Runtime.Create(t.Context(), i, r.data(fmt.Sprintf("uuid-%d", i))))
	}
	r.must(r.Delete(t.Context(), 1, "uuid-1"))
	r.wantExited(1, 137, "killed")
	r.must(r.Stop(t.Context()))
	for range 2 {
		if m := r.receive(); m.Arg != wire.Exited {
			t.Errorf("received %+v, want a message of type Exited", m)
		}
	}
	if err := r.Delete(t.Context(), 9, "uuid-9"); !errdefs.IsNotFound(err) {
		t.Errorf("delete of an unknown index: %v", err)
	}
}

func TestDeadline(t *testing.T) {
	r := newRig(t)
	r.create(0, uuid, `"resources":{"deadline":"50ms"}`)
	if e := r.wantExited(0, 137, "deadline"); e.Message == "" {
		t.Error("the end has no message")
	}
}

// TestCreateRefused: data that cannot be honoured are refused with an error class, and leave nothing behind.
func TestCreateRefused(t *testing.T) {
	r := newRig(t)
	data := filepath.Join(r.dir, "data")
	r.must(errors.Join(
		os.MkdirAll(data, 0o755), os.Symlink("/etc", filepath.Join(data, "out")), os.WriteFile(filepath.Join(data, "file"), nil, 0o644),
		os.WriteFile(filepath.Join(r.dir, "outside.wasm"), emptyModule, 0o644),
		os.Symlink("../outside.wasm", filepath.Join(r.modules, "link.wasm")),
		os.WriteFile(filepath.Join(r.modules, "text.wasm"), []byte("#!/bin/sh"), 0o644), os.Mkdir(filepath.Join(r.modules, "dir.wasm"), 0o755),
	))
	r.create(3, "running")
	for name, c := range map[string]struct {
		index int
		more  []string
		class func(error) bool
		say   string
	}{
		"index in use":         {3, nil, errdefs.IsAlreadyExists, "running"},
		"index too high":       {128, nil, errdefs.IsResourceExhausted, "128"},
		"negative index":       {-1, nil, errdefs.IsResourceExhausted, "-1"},
		"uuid in use":          {0, []string{`"uuid":"running"`}, errdefs.IsAlreadyExists, "index 3"},
		"no uuid":              {0, []string{`"uuid":""`}, errdefs.IsInvalidArgument, "uuid"},
		"file type":            {0, []string{`"filetype":"PY"`}, errdefs.IsInvalidArgument, `"PY"`},
		"no file":              {0, []string{`"file":null`}, errdefs.IsInvalidArgument, "a file or an image"},
		"file and image":       {0, []string{`"image":"a/b@sha256:x"`}, errdefs.IsInvalidArgument, "not both"},
		"file is not there":    {0, []string{`"file":"` + r.modules + `/none.wasm"`}, errdefs.IsNotFound, "none.wasm"},
		"file outside":         {0, []string{`"file":"` + r.dir + `/outside.wasm"`}, errdefs.IsPermissionDenied, "outside.wasm"},
		"file above":           {0, []string{`"file":"../outside.wasm"`}, errdefs.IsPermissionDenied, "leads out"},
		"file by a link":       {0, []string{`"file":"link.wasm"`}, errdefs.IsPermissionDenied, "leads out"},
		"file is text":         {0, []string{`"file":"text.wasm"`}, errdefs.IsInvalidArgument, "text.wasm"},
		"file is a directory":  {0, []string{`"file":"dir.wasm"`}, errdefs.IsInvalidArgument, "dir.wasm"},
		"image without digest": {0, []string{`"file":null`, `"image":"example.com/m:1"`}, errdefs.IsInvalidArgument, "digest"},
		"image is not there": {0, []string{`"file":null`, `"image":"example.com/none@sha256:` + strings.Repeat("0", 64) + `"`},
			errdefs.IsNotFound, "none"},
		"image is no name":  {0, []string{`"file":null`, `"image":"A B"`}, errdefs.IsInvalidArgument, "A B"},
		"env":               {0, []string{`"env":["=x"]`}, errdefs.IsInvalidArgument, "NAME=value"},
		"dir outside":       {0, []string{`"dirs":["/etc"]`}, errdefs.IsPermissionDenied, "/etc"},
		"dir by a link":     {0, []string{`"dirs":["` + data + `/out"]`}, errdefs.IsPermissionDenied, "leads out"},
		"dir is a file":     {0, []string{`"dirs":["` + data + `/file"]`}, errdefs.IsInvalidArgument, "file"},
		"dir is not there":  {0, []string{`"dirs":["` + data + `/none"]`}, errdefs.IsNotFound, "none"},
		"dir over channels": {0, []string{`"dirs":["` + data + `::/ch/x"]`}, errdefs.IsInvalidArgument, "/ch"},
		"memory":            {0, []string{`"resources":{"memory":"much"}`}, errdefs.IsInvalidArgument, "much"},
		"cpu":               {0, []string{`"resources":{"cpu":-1}`}, errdefs.IsInvalidArgument, "-1"},
		"deadline":          {0, []string{`"resources":{"deadline":1e300}`}, errdefs.IsInvalidArgument, "deadline"},
		"channel's name":    {0, []string{`"channels":[{"name":"a/b","mode":"r","topic":"t"}]`}, errdefs.IsInvalidArgument, "a/b"},
	} {
		err := r.Create(t.Context(), c.index, r.data(uuid, c.more...))
		if !c.class(err) || !strings.Contains(err.Error(), c.say) {
			t.Errorf("%s: Create returned %v, want an error of its class with %q in it", name, err, c.say)
		}
		if n := len(r.node.Pods()); n != 1 {
			t.Fatalf("%s: %d pods, want only that of the running module", name, n)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(r.config.LogDir, "*")); len(left) != 2 { // of the running one, and the positions
		t.Errorf("files are left: %v", left)
	}
	r.create(0, uuid)
}

// TestStartFails: the pod of a module that cannot start is removed, and no exit is reported besides the error.
func TestStartFails(t *testing.T) {
	r := newRig(t)
	r.config.Node = failing{r.node}
	broken, err := New(r.config)
	r.must(err)
	defer broken.Close()
	_, err = broken.Start(t.Context())
	r.must(err)
	if err := broken.Create(t.Context(), 0, r.data(uuid)); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Create of a module that cannot start returned %v, want FailedPrecondition", err)
	}
	if pods := r.node.Pods(); len(pods) != 0 {
		t.Errorf("pods are left: %v, want none", pods)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if m, err := broken.Receive(ctx); err == nil {
		t.Errorf("message %+v", m)
	}
}

// failing is a node on which nothing starts.
type failing struct{ *node.Node }

func (failing) StartContainer(context.Context, string) error {
	return fmt.Errorf("the guest has no memory: %w", errdefs.ErrFailedPrecondition)
}

func TestPodIsRemovedByAnother(t *testing.T) {
	r := newRig(t)
	p := r.create(0, uuid)
	r.must(r.node.StopSandbox(t.Context(), p.ID))
	r.must(r.node.RemoveSandbox(t.Context(), p.ID))
	r.wantExited(0, 137, "exited")
	r.cleanup(0, uuid)
}

func TestEndings(t *testing.T) {
	for want, c := range map[string]struct {
		container node.Container
		order     string
	}{
		"0 exited":     {node.Container{Reason: sandbox.ReasonCompleted}, ""},
		"134 exited":   {node.Container{ExitCode: 134, Reason: sandbox.ReasonError}, ""},
		"134 trap":     {node.Container{ExitCode: 134, Reason: sandbox.ReasonError, Message: "unreachable"}, ""},
		"137 oom":      {node.Container{ExitCode: 137, Reason: sandbox.ReasonOOMKilled, Message: "memory"}, reasonKilled},
		"137 killed":   {node.Container{ExitCode: 137, Reason: sandbox.ReasonError, Message: "its worker has died"}, ""},
		"137 deadline": {node.Container{ExitCode: 137, Reason: sandbox.ReasonError, Message: "killed"}, reasonDeadline},
		"255 killed":   {node.Container{ExitCode: 255, Reason: sandbox.ReasonUnknown}, ""},
		"3 killed":     {node.Container{ExitCode: 3, Reason: sandbox.ReasonError}, reasonKilled},
		"0 killed":     {node.Container{Reason: sandbox.ReasonCompleted}, reasonKilled},
	} {
		e := endingOf(&c.container, c.order)
		if got := fmt.Sprintf("%d %s", e.Code, e.Reason); got != want {
			t.Errorf("%+v, order %q: %s, want %s", c.container, c.order, got, want)
		}
	}
	raw, err := json.Marshal(ending{1, "exited", ""})
	if err != nil || string(raw) != `{"code":1,"reason":"exited","message":""}` {
		t.Errorf("an ending is encoded as %s (%v), want code, reason and message", raw, err)
	}
}

// TestAllModules fills a runtime twice.
func TestAllModules(t *testing.T) {
	r := newRig(t)
	for range 2 {
		failed := make(chan error, channel.MaxModules)
		for i := range channel.MaxModules {
			data := r.data(fmt.Sprintf("module-%d", i), `"channels":[{"mode":"rw","topic":"t"}]`)
			go func() { failed <- r.Create(t.Context(), i, data) }()
		}
		for range channel.MaxModules {
			r.must(<-failed)
		}
		if err := r.Create(t.Context(), channel.MaxModules, r.data("one-more")); !errdefs.IsResourceExhausted(err) {
			t.Errorf("one more: %v", err)
		}
		for i := range channel.MaxModules {
			r.print(fmt.Sprintf("module-%d", i), "hello")
		}
		seen := map[int]bool{}
		for range channel.MaxModules {
			m := r.receive()
			seen[m.Module] = m.Arg == wire.ModuleLog && string(m.Payload) == "hello"
		}
		if len(seen) != channel.MaxModules {
			t.Errorf("%d modules have spoken", len(seen))
		}
		go func() { failed <- r.Stop(context.Background()) }()
		for range channel.MaxModules {
			m := r.receive()
			if m.Arg != wire.Exited {
				t.Fatalf("message %+v %q", m.Header, m.Payload)
			}
			r.cleanup(m.Module, fmt.Sprintf("module-%d", m.Module))
		}
		r.must(<-failed)
		for range channel.MaxModules {
			_ = (<-r.guests.conns).Close()
		}
	}
	if n := len(r.node.Pods()); n != 0 {
		t.Errorf("%d pods are left, want 0", n)
	}
}
