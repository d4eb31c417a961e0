package bench

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cli"
	"github.com/tripod-run/tripod/internal/keys"
)

// Options configures the pods.
type Options struct {
	Image       string
	Command     []string
	Handler     string
	HostNetwork bool
	// CgroupParent is the cgroup below which each pod gets its own parent cgroup (cgroupfs), as a kubelet would
	// arrange; empty means none.
	CgroupParent string
	// Annotations are the pods' annotations. In their values, {port} is replaced with a different port number for each
	// pod.
	Annotations map[string]string
	// Memory is the memory limit of each container in bytes; 0 means none.
	Memory int64
	// LogDir is the parent of the pods' log directories.
	LogDir string
}

// driver makes and removes pods through one endpoint.
type driver struct {
	client *cli.Client
	o      Options
	run    string // marks the pods of this run
	serial atomic.Int64
}

func newDriver(client *cli.Client, o Options) *driver {
	var mark [4]byte
	_, _ = rand.Read(mark[:]) // documented never to fail
	return &driver{client: client, o: o, run: hex.EncodeToString(mark[:])}
}

// pod is a pod with one container.
type pod struct {
	id, container string
	config        *runtimeapi.PodSandboxConfig
}

// firstPort and the following ports replace {port} in annotations.
const firstPort = 20000

func (d *driver) configs() (*runtimeapi.PodSandboxConfig, *runtimeapi.ContainerConfig) {
	serial := d.serial.Add(1)
	name := fmt.Sprintf("bench-%s-%d", d.run, serial)
	network := runtimeapi.NamespaceMode_POD
	if d.o.HostNetwork {
		network = runtimeapi.NamespaceMode_NODE
	}
	spaces := &runtimeapi.NamespaceOption{Network: network, Pid: runtimeapi.NamespaceMode_CONTAINER}
	labels := map[string]string{keys.Bench: d.run}
	sandbox := &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "bench", Uid: name},
		LogDirectory: filepath.Join(d.o.LogDir, "bench_"+name), Labels: labels, Annotations: map[string]string{},
		Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: spaces}},
	}
	for key, value := range d.o.Annotations {
		sandbox.Annotations[key] = strings.ReplaceAll(value, "{port}", strconv.FormatInt(firstPort+serial, 10))
	}
	if d.o.CgroupParent != "" {
		sandbox.Linux.CgroupParent = path.Join(d.o.CgroupParent, name)
	}
	container := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "main"}, Labels: labels, LogPath: "main/0.log",
		Image: &runtimeapi.ImageSpec{Image: d.o.Image}, Command: d.o.Command,
		Linux: &runtimeapi.LinuxContainerConfig{
			Resources:       &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: d.o.Memory},
			SecurityContext: &runtimeapi.LinuxContainerSecurityContext{NamespaceOptions: spaces},
		},
	}
	return sandbox, container
}

// startPod starts one pod. The up phase is RunPodSandbox, CreateContainer and StartContainer.
func (d *driver) startPod(ctx context.Context, r *recorder) (*pod, error) {
	sandbox, container := d.configs()
	p := &pod{config: sandbox}
	return p, r.time("up phase", func() error {
		err := r.time("RunPodSandbox", func() (err error) {
			p.id, err = d.client.RunPodSandbox(ctx, sandbox, d.o.Handler)
			return err
		})
		if err != nil {
			return fmt.Errorf("RunPodSandbox: %w", err)
		}
		err = r.time("CreateContainer", func() (err error) {
			p.container, err = d.client.CreateContainer(ctx, p.id, container, sandbox)
			return err
		})
		if err != nil {
			return fmt.Errorf("CreateContainer: %w", err)
		}
		if err = r.time("StartContainer", func() error { return d.client.StartContainer(ctx, p.container) }); err != nil {
			return fmt.Errorf("StartContainer: %w", err)
		}
		return nil
	})
}

// removePod stops and removes one pod.
func (d *driver) removePod(ctx context.Context, r *recorder, p *pod) error {
	return r.time("down phase", func() error {
		for _, step := range []struct {
			call string
			do   func() error
		}{
			{"StopContainer", func() error { return d.client.StopContainer(ctx, p.container, 10) }},
			{"RemoveContainer", func() error { return d.client.RemoveContainer(ctx, p.container) }},
			{"StopPodSandbox", func() error { return d.client.StopPodSandbox(ctx, p.id) }},
			{"RemovePodSandbox", func() error { return d.client.RemovePodSandbox(ctx, p.id) }},
		} {
			if err := r.time(step.call, step.do); err != nil {
				return fmt.Errorf("%s: %w", step.call, err)
			}
		}
		return nil
	})
}

// sweepTimeout is the time to remove all pods, and sweepPerPod more for each of them.
const (
	sweepTimeout = 2 * time.Minute
	sweepPerPod  = time.Second
)

// sweep removes every pod of this run, including failed ones, and the cgroups made for them. It has its own timeout,
// because ctx may have ended.
func (d *driver) sweep(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), sweepTimeout+time.Duration(d.serial.Load())*sweepPerPod)
	defer cancel()
	pods, err := d.client.ListPodSandbox(ctx, &runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{keys.Bench: d.run}})
	if err != nil {
		return err
	}
	defer d.removeCgroups()
	return parallel(ctx, 10, len(pods), func(i int) error {
		if err := d.client.StopPodSandbox(ctx, pods[i].GetId()); err != nil {
			return err
		}
		return d.client.RemovePodSandbox(ctx, pods[i].GetId())
	})
}

// removeCgroups removes the pods' parent cgroups, because runtimes create missing ones and leave their removal to the
// kubelet.
func (d *driver) removeCgroups() {
	if d.o.CgroupParent == "" {
		return
	}
	for _, hierarchy := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
		dirs, _ := filepath.Glob(filepath.Join(hierarchy, d.o.CgroupParent, "bench-"+d.run+"-*"))
		for _, dir := range dirs {
			_ = unix.Rmdir(dir) // a cgroup in use stays
			_ = unix.Rmdir(filepath.Dir(dir))
		}
	}
}

// parallel calls the function once with each number from 0 to n-1, from the given number of workers. After the first
// error it makes no further calls.
func parallel(ctx context.Context, workers, n int, do func(i int) error) error {
	var next atomic.Int64
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	for range min(workers, n) {
		wg.Go(func() {
			for i := next.Add(1) - 1; i < int64(n) && ctx.Err() == nil; i = next.Add(1) - 1 {
				if err := do(int(i)); err != nil {
					cancel(err)
				}
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// ensureImage pulls the image if it is missing, before the measurement.
func (d *driver) ensureImage(ctx context.Context) error {
	image, err := d.client.ImageStatus(ctx, d.o.Image)
	if err != nil || image != nil {
		return err
	}
	_, err = d.client.Images.PullImage(ctx, &runtimeapi.ImageSpec{Image: d.o.Image}, nil, nil)
	return err
}
