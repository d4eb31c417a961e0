package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// TestNRIHangingPlugin: a plugin that does not answer holds a pod no longer than its timeout, once.
func TestNRIHangingPlugin(t *testing.T) {
	d := harness.StartDaemon(t, harness.Set("nri.request_timeout", "300ms"), harness.Set("nri.registration_timeout", "300ms"),
		harness.Set("nri.synchronization_timeout", "300ms"))
	d.Pull(t, harness.Busybox)
	release := make(chan struct{})
	defer close(release)
	hanging := &nriPlugin{on: func(context.Context, nriEvent) error { <-release; return nil }}
	connectPlugin(t, d, "00", "hangs", hanging)
	second := connectPlugin(t, d, "10", "works", &nriPlugin{})
	c := startPod(t, d).Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
	receive(t, hanging.closed)
	if got := hanging.calls(c.Pod.ID); !slices.Equal(got, podCalls[:1]) {
		t.Errorf("the plugin that hangs got %v, want only the call that it did not answer", got)
	}
	second.waitCalls(t, c.ID, containerCalls[:4]...)
	if info := daemonInfo(t, d); !strings.Contains(info, `"nodePlugins":["10-works"]`) {
		t.Errorf("verbose status: got %s, want only the plugin that works", info)
	}
	sync := &nriPlugin{onSync: func(context.Context) { <-release }}
	if err := startPlugin(d, "20", "never", sync); err == nil {
		t.Cleanup(sync.stub.Stop)
	}
	c.Pod.Run(harness.ContainerConfig("next", harness.Busybox, harness.Sleep()))
}

// TestNRISlowSynchronization: with the defaults, a plugin may take longer for its synchronisation than for any other answer, and
// learns of the containers that are made meanwhile. The bounds are those of the calls, which the plugin sees.
func TestNRISlowSynchronization(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	p := startPod(t, d)
	bounds := make(chan time.Duration, 2)
	note := func(ctx context.Context) {
		deadline, _ := ctx.Deadline()
		bounds <- time.Until(deadline)
	}
	slow := connectPlugin(t, d, "00", "slow", &nriPlugin{onSync: note, on: func(ctx context.Context, e nriEvent) error {
		if e.call == "CreateContainer" {
			note(ctx)
		}
		return nil
	}})
	c := p.Run(harness.ContainerConfig("during", harness.Busybox, harness.Sleep()))
	if synchronisation, other := receive(t, bounds), receive(t, bounds); synchronisation < 3*time.Second || other > 2*time.Second {
		t.Errorf("bounds: got %v for the synchronisation and %v for a container, want nearly 10 s and at most 2 s", synchronisation, other)
	}
	slow.waitCalls(t, c.ID, containerCalls[:4]...)
	if n := slow.seen(p.ID); n != 1 {
		t.Errorf("the plugin learned %d times of the pod, want once", n)
	}
}

// TestNRIInstalledPlugins: the daemon starts plugins, ends them when it stops, and starts them again with its pods.
func TestNRIInstalledPlugins(t *testing.T) {
	d := harness.NewDaemon(t)
	self, err := os.Executable()
	dir, dirErr := os.Getwd()
	if err := errors.Join(err, dirErr); err != nil {
		t.Fatal(err)
	}
	script := fmt.Sprintf("#!/bin/sh\ncd %s && exec %s\n", dir, self) // this program needs its directory
	log := filepath.Join(d.Dir, "plugin.log")
	for _, dir := range []string{"plugins", "plugins.d"} {
		if err := os.MkdirAll(filepath.Join(d.Dir, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"10-logger", "20-injector"} {
		if err := os.WriteFile(filepath.Join(d.Dir, "plugins", name), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(d.Dir, "plugins.d", "logger.conf"), []byte(log), 0o644); err != nil {
		t.Fatal(err)
	}
	d.Start()
	d.Pull(t, harness.Busybox)
	p := startPod(t, d, func(c *runtimeapi.PodSandboxConfig) {
		c.Annotations = map[string]string{"devices.nri.io/container.c": "- {path: /dev/injected, type: c, major: 1, minor: 3}"}
	})
	c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
	c.Must("sh", "-c", "echo x >/dev/injected && test -c /dev/injected")
	d.Stop()
	d.Start()
	if info := daemonInfo(t, d); !strings.Contains(info, `"nodePlugins":["10-logger","20-injector"]`) {
		t.Errorf("verbose status: got %s, want both plugins", info)
	}
	p.Stop()
	p.Remove()
	want := "RunPodSandbox p\nStartContainer c " + fmt.Sprint(c.Config.Command) + "\nStopPodSandbox p\nRemovePodSandbox p\n"
	if got := read(t, log); got != want {
		t.Errorf("the logger wrote %q, want %q", got, want)
	}
}

// TestNRIOtherKinds: plugins follow components and machines too. What these cannot honour is refused by name.
func TestNRIOtherKinds(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"), harness.VM(t))
	var adjustment *api.ContainerAdjustment
	plugin := connectPlugin(t, d, "00", "follows",
		&nriPlugin{onCreate: func(*api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate) {
			return adjustment, nil
		}})
	adjustment = &api.ContainerAdjustment{}
	adjustment.AddEnv("BY", "plugin")
	adjustment.AddAnnotation("by", "plugin")
	adjustment.SetLinuxMemoryLimit(48 << 20)
	c := d.RunWasm(t, &harness.PodSpec{Image: harness.CommandGo,
		Container: []harness.ContainerOption{func(c *runtimeapi.ContainerConfig) { c.Args = []string{"env"} }}})
	c.WaitExit(0)
	if text := c.WaitLog("BY=plugin"); text == "" {
		t.Error("the component does not have the plugin's variable")
	}
	if r := c.Status().GetResources().GetLinux(); r.GetMemoryLimitInBytes() != 48<<20 {
		t.Errorf("resources of the component: got %v, want the plugin's limit", r)
	}
	plugin.waitCalls(t, c.ID, containerCalls[:5]...)
	if p, m := plugin.pod(c.Pod.ID), plugin.container(c.ID); p.RuntimeHandler != "wasm" || m.Annotations["by"] != "plugin" {
		t.Errorf("the plugin sees pod %v and container %v, want handler wasm and its annotation", p, m)
	}
	c.Pod.Remove()
	plugin.waitCalls(t, c.ID, containerCalls...)
	plugin.waitCalls(t, c.Pod.ID, podCalls...)

	for handler, image := range map[string]string{"wasm": harness.CommandGo, "vm": harness.Guest} {
		p := d.RunPodWith(t, harness.PodConfig(t, handler), handler)
		t.Cleanup(p.Remove)
		d.Pull(t, image)
		adjustment = &api.ContainerAdjustment{}
		adjustment.AddRlimit("RLIMIT_NOFILE", 10, 10)
		adjustment.SetLinuxPidLimits(5)
		_, err := create(d, p, harness.ContainerConfig("c", image))
		wantCode(t, err, codes.Unimplemented)
		if err == nil || !strings.Contains(err.Error(), "linux.resources.pids, rlimits") {
			t.Errorf("CreateContainer with handler %s: got error %v, want that it names both adjustments", handler, err)
		}
		adjustment = nil
		made := p.Create(harness.ContainerConfig("c", image))
		p.Remove()
		plugin.waitCalls(t, made.ID, "CreateContainer", "PostCreateContainer", "StopContainer", "RemoveContainer")
		plugin.waitCalls(t, p.ID, podCalls...)
	}
}
