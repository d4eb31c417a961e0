package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cli"
)

// node is the node under test and the configuration of its pods.
type node struct {
	client *cli.Client
	image  string
	logs   string
	memory uint64
	daemon int
}

// pod is a running machine.
type pod struct{ id, container, log string }

// start starts a machine and returns the time at which it called StartContainer.
func (n *node) start(ctx context.Context, name string) (p *pod, started time.Time, err error) {
	config := &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "vmbench", Uid: name},
		LogDirectory: filepath.Join(n.logs, "vmbench_"+name), Linux: &runtimeapi.LinuxPodSandboxConfig{},
	}
	container := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "main"}, LogPath: "main.log",
		Image: &runtimeapi.ImageSpec{Image: n.image},
		// Without a CPU request, a pod would get only the CPU time that others leave over, unlike a QEMU started by
		// hand.
		Linux: &runtimeapi.LinuxContainerConfig{Resources: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: int64(n.memory),
			CpuShares: 1024}},
	}
	if err := os.MkdirAll(config.LogDirectory, 0o755); err != nil {
		return nil, started, err
	}
	p = &pod{log: filepath.Join(config.LogDirectory, container.LogPath)}
	if p.id, err = n.client.RunPodSandbox(ctx, config, "vm"); err != nil {
		return p, started, fmt.Errorf("RunPodSandbox: %w", err)
	}
	if p.container, err = n.client.CreateContainer(ctx, p.id, container, config); err != nil {
		return p, started, fmt.Errorf("CreateContainer: %w", err)
	}
	started = time.Now()
	if err = n.client.StartContainer(ctx, p.container); err != nil {
		return p, started, fmt.Errorf("StartContainer: %w", err)
	}
	return p, started, nil
}

func (n *node) remove(ctx context.Context, p *pod) error {
	if p == nil || p.id == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	if err := n.client.StopPodSandbox(ctx, p.id); err != nil {
		return err
	}
	return n.client.RemovePodSandbox(ctx, p.id)
}

// live boots a machine, measures its memory and stops it.
func (n *node) live(ctx context.Context, name string) (l life, err error) {
	begun := time.Now()
	p, started, err := n.start(ctx, name)
	defer func() { err = errors.Join(err, n.remove(ctx, p)) }()
	if err != nil {
		return l, err
	}
	if err := awaitText(ctx, p.log); err != nil {
		return l, err
	}
	l.whole, l.ready = time.Since(begun), time.Since(started)
	pid, err := n.pid(ctx, p)
	if err != nil {
		return l, err
	}
	if l.cpu, err = processorTime(pid); err != nil {
		return l, err
	}
	if l.ram, l.rest, err = resident(pid, n.memory); err != nil {
		return l, err
	}
	stopping := time.Now()
	if err := n.client.StopContainer(ctx, p.container, int64(patience/time.Second)); err != nil {
		return l, err
	}
	l.off = time.Since(stopping)
	status, err := n.client.ContainerStatus(ctx, p.container, false)
	if err == nil && (status.GetStatus().GetState() != runtimeapi.ContainerState_CONTAINER_EXITED || status.GetStatus().GetExitCode() != 0) {
		err = fmt.Errorf("the machine is %v with exit code %d after StopContainer", status.GetStatus().GetState(),
			status.GetStatus().GetExitCode())
	}
	return l, err
}

// awaitText waits until the log contains readyLine. It polls every 2 ms.
func awaitText(ctx context.Context, log string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		data, err := os.ReadFile(log)
		if err == nil && bytes.Contains(data, []byte(readyLine)) {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("the guest is not ready: %w\n%s", ctx.Err(), data)
		}
	}
}

// pid returns the process ID of QEMU.
func (n *node) pid(ctx context.Context, p *pod) (int, error) {
	resp, err := n.client.ContainerStatus(ctx, p.container, true)
	if err != nil {
		return 0, err
	}
	var info struct {
		Pid int `json:"pid"`
	}
	if err := json.Unmarshal([]byte(resp.GetInfo()["info"]), &info); err != nil || info.Pid == 0 {
		return 0, fmt.Errorf("ContainerStatus reports no PID: %w", errors.Join(err, errors.New(resp.GetInfo()["info"])))
	}
	return info.Pid, nil
}

// crowd starts the given number of machines and returns by how many bytes the daemon's memory grew for each machine.
func (n *node) crowd(ctx context.Context, count int) (each uint64, err error) {
	if n.daemon == 0 || count == 0 {
		return 0, nil
	}
	before, err := anonymous(n.daemon)
	if err != nil {
		return 0, err
	}
	var pods []*pod
	defer func() {
		for _, p := range pods {
			err = errors.Join(err, n.remove(ctx, p))
		}
	}()
	for i := range count {
		p, _, err := n.start(ctx, fmt.Sprintf("crowd-%d", i))
		pods = append(pods, p)
		if err != nil {
			return 0, err
		}
	}
	for _, p := range pods {
		if err := awaitText(ctx, p.log); err != nil {
			return 0, err
		}
	}
	after, err := anonymous(n.daemon)
	return (max(after, before) - before) / uint64(count), err
}

// ensureImage pulls the image unless the node has it.
func (n *node) ensureImage(ctx context.Context) error {
	if image, err := n.client.ImageStatus(ctx, n.image); err != nil || image != nil {
		return err
	}
	_, err := n.client.Images.PullImage(ctx, &runtimeapi.ImageSpec{Image: n.image}, nil, nil)
	return err
}
