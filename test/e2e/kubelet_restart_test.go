package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/tripod-run/tripod/test/harness"
)

// kubeLostSandbox: if another client stops a sandbox, the kubelet creates the next sandbox, in which all containers
// start again.
func kubeLostSandbox(t *testing.T, k *kubelet) {
	c := &kubeContainer{name: "c", image: harness.Busybox, command: sleeps("")}
	never := &kubeContainer{name: "never", image: harness.Busybox, command: sleeps("")}
	p := k.newPod("lost", c)
	p.init = []*kubeContainer{{name: "init", image: harness.Busybox, command: shell("echo x >>/data/inits")}}
	first := k.states(p, "init exited, c running")
	_, err := k.runtime.CreateContainer(context.Background(), first.sandbox().Id, k.containerConfig(p, never, k.ensureImage(never.image), 0),
		k.sandboxConfig(p, 0))
	k.must(err)
	k.must(k.runtime.StopPodSandbox(context.Background(), first.sandbox().Id))
	if s := k.status(p); s.sandbox() != nil || s.state(c) != "exited" || s.sandboxes[0].GetNetwork().GetIp() != "" {
		t.Errorf("status after StopPodSandbox: got %v, want all stopped and no address", s)
	}
	k.removeContainer(k.status(p).of(never)) // it was created but never started
	second := k.wait(p, func(s *podStatus) error {
		if s.sandbox().GetMetadata().GetAttempt() != 1 || s.state(c) != "running" {
			return fmt.Errorf("want container c running in the second sandbox, got %v", s)
		}
		return nil
	})
	if second.of(c).Metadata.Attempt != 1 || second.sandbox().GetNetwork().GetIp() == "" {
		t.Errorf("status: got %v, want the second attempt and an address", second)
	}
	inits, err := os.ReadFile(filepath.Join(k.dir(p), "emptydir", "inits"))
	k.must(err)
	if string(inits) != "x\nx\n" {
		t.Errorf("runs of the init container: got %q, want two", inits)
	}
	k.must(k.runtime.StopContainer(context.Background(), second.of(c).Id, 2))
	k.wait(p, func(s *podStatus) error { // the old sandbox is removed after its last container
		if len(s.sandboxes) != 1 || s.state(c) != "running" {
			return fmt.Errorf("want one sandbox with container c running, got %v", s)
		}
		return nil
	})
}

// kubeTermination tests stops with a long and a short grace period, and a second order with a shorter one.
func kubeTermination(t *testing.T, k *kubelet) {
	ctx := context.Background()
	polite := &kubeContainer{name: "polite", image: harness.Busybox, command: sleeps("")}
	deaf := &kubeContainer{name: "deaf", image: harness.Busybox, command: shell("trap '' TERM; while :; do sleep 1; done")}
	p := k.newPod("end", polite, deaf)
	s := k.states(p, "polite running, deaf running")
	begin := time.Now()
	k.must(k.runtime.StopContainer(ctx, s.of(polite).Id, 30))
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("stop of a container that exits on SIGTERM: took %v, want at most 10s", took)
	}
	if got := harness.Text(harness.ReadLog(t, s.of(polite).LogPath), "stdout"); got != "asked to end\n" {
		t.Errorf("log: got %q, want %q", got, "asked to end\n")
	}
	long := make(chan error, 1)
	go func() { long <- k.runtime.StopContainer(ctx, s.of(deaf).Id, 600) }()
	harness.Eventually(t, waitLimit, func() error { // the first order is in progress
		if k.status(p).state(deaf) != "running" {
			return errors.New("not running")
		}
		return nil
	})
	begin = time.Now()
	p.grace, p.deleted = 2, true // kubectl delete --force --grace-period=0 results in 2 seconds
	k.sync(p, k.status(p))
	k.must(<-long)
	if took := time.Since(begin); took < time.Second || took > 15*time.Second {
		t.Errorf("forced stop: took %v, want 1s to 15s", took)
	}
	if c := k.status(p).of(deaf); c.State != exited || c.ExitCode != 137 {
		t.Errorf("status: got %v, want exited with code 137", c)
	}
	for range 2 { // a repeated stop must succeed, even without the cgroup
		k.must(k.runtime.StopContainer(ctx, s.of(deaf).Id, 2))
		k.must(k.runtime.StopPodSandbox(ctx, s.sandbox().Id))
	}
	k.remove(p)
}

// kubeRestarted: after a restart of the kubelet and the daemon, running containers are unchanged, and containers that
// were only created are replaced.
func kubeRestarted(t *testing.T, k *kubelet) {
	ctx := context.Background()
	up := &kubeContainer{name: "up", image: harness.Busybox, command: sleeps("")}
	half := &kubeContainer{name: "half", image: harness.Busybox, command: sleeps("")}
	p := k.newPod("restarted", up)
	p.grace = 2
	s := k.states(p, "up running")
	id, err := k.runtime.CreateContainer(ctx, s.sandbox().Id, k.containerConfig(p, half, k.ensureImage(half.image), 0), k.sandboxConfig(p, 0))
	k.must(err)
	before := k.relist()
	k.d.Restart()
	k = newKubelet(t, k.d)
	if after := k.relist(); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("states after the restart: got %v, want %v", after, before)
	}
	p.containers = append(p.containers, half)
	again := k.states(p, "up running, half running")
	if again.of(up).String() != s.of(up).String() || again.sandbox().Id != s.sandbox().Id {
		t.Errorf("status of the running container: got %v, want %v", again.of(up), s.of(up))
	}
	if again.of(half).Metadata.Attempt != 1 || again.of(half).Id == id {
		t.Errorf("container that was only created: got %v, want the second attempt with another ID than %s", again.of(half), id)
	}
	k.remove(p)
}
