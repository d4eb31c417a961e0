package soak

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

const (
	running = runtimeapi.ContainerState_CONTAINER_RUNNING
	exited  = runtimeapi.ContainerState_CONTAINER_EXITED
	created = runtimeapi.ContainerState_CONTAINER_CREATED
)

// gone are the codes for an order whose object no longer exists or is no longer in the right state.
var gone = []codes.Code{codes.NotFound, codes.FailedPrecondition}

// worker makes random calls, most of them for its own pod, some for the shared pods.
type worker struct {
	*soak
	name string
	rng  *rand.Rand
	own  *pod
}

func newWorker(s *soak, seed uint64, i int) *worker {
	name := fmt.Sprintf("own-%d", i)
	return &worker{soak: s, name: name, rng: rand.New(rand.NewPCG(seed, uint64(i)+100)), own: s.newPod(name, false, s.rng)}
}

func (w *worker) work(stop <-chan struct{}) {
	for !w.t.Failed() {
		select {
		case <-stop:
			return
		default:
		}
		p := w.own
		if w.rng.IntN(4) == 0 {
			p = w.shared[w.rng.IntN(len(w.shared))]
		}
		w.step(p)
	}
}

// step makes one random order for a pod.
func (w *worker) step(p *pod) {
	p.mu.Lock()
	id, known := p.id, len(p.containers)
	p.mu.Unlock()
	if id == "" {
		w.runPod(p)
		return
	}
	switch n := w.rng.IntN(100); {
	case n < 14:
		w.images()
	case n < 34 && known < 4:
		w.create(p)
	case n < 37:
		w.runPod(p) // a repeat
	case n < 40:
		w.stopPod(p)
	case n < 43:
		w.removePod(p)
	case n < 50:
		w.look(p)
	default:
		if c := p.any(w.rng); c != nil {
			w.stepContainer(c)
		}
	}
}

func (w *worker) stepContainer(c *container) {
	switch n := w.rng.IntN(100); {
	case n < 35:
		w.start(c)
	case n < 45:
		w.stop(c)
	case n < 55:
		w.remove(c)
	case n < 62:
		w.update(c)
	case n < 75:
		w.execSync(c)
	case n < 85:
		w.stream(c)
	case n < 92:
		w.rotate(c)
	default:
		w.statusOf(c)
	}
}

func (w *worker) do(name string, allowed []codes.Code, call func(context.Context) error) (ok bool) {
	err, answered := w.call(w.rng, w.name+" "+name, allowed, call)
	return answered && err == nil
}

func (w *worker) runPod(p *pod) {
	p.mu.Lock()
	config := p.config
	p.mu.Unlock()
	var id string
	if !w.do("RunPodSandbox "+p.name, []codes.Code{codes.AlreadyExists}, func(ctx context.Context) error {
		resp, err := w.cri.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: config})
		id = resp.GetPodSandboxId()
		return err
	}) {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.shared && p.id != "" && (p.id != id || p.stopped) && !w.isHarmed(p.id) {
		w.t.Errorf("repeated RunPodSandbox: got %s, want %s (stopped: %v)", id, p.id, p.stopped)
	}
	if p.config == config {
		p.id = id
	}
}

func (w *worker) create(p *pod) {
	p.mu.Lock()
	c, podID, stopped := p.newContainer(w.rng), p.id, p.stopped
	p.mu.Unlock()
	request := &runtimeapi.CreateContainerRequest{PodSandboxId: podID, Config: c.config, SandboxConfig: p.config}
	ok := w.do("CreateContainer "+c.config.Metadata.Name, gone, func(ctx context.Context) error {
		resp, err := w.cri.CreateContainer(ctx, request)
		c.id = resp.GetContainerId()
		return err
	})
	if !p.shared && ok == stopped && !w.isHarmed(podID) {
		w.t.Errorf("CreateContainer in %s: got success %v, want %v", podID, ok, !stopped)
	}
	if !ok {
		return
	}
	p.add(c)
	w.expect(c, created)
	if w.rng.IntN(8) == 0 {
		again, allowed := c.id, gone
		if p.shared {
			allowed = append(gone, codes.AlreadyExists) // another worker has changed its resources
		}
		if w.do("CreateContainer again", allowed, func(ctx context.Context) error {
			resp, err := w.cri.CreateContainer(ctx, request)
			again = resp.GetContainerId()
			return err
		}) && again != c.id && !p.shared {
			w.t.Errorf("repeated CreateContainer: got %s, want %s", again, c.id)
		}
	}
	if w.rng.IntN(4) > 0 {
		w.start(c)
	}
}

// start starts a container. If its program does not exist, the call must fail and the container must have exited.
func (w *worker) start(c *container) {
	ok := w.do("StartContainer "+c.id, append(gone, codes.InvalidArgument), func(ctx context.Context) error {
		_, err := w.cri.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: c.id})
		return err
	})
	if c.pod.shared {
		return
	}
	startable := !c.pod.stopped && (c.kind != "missing" || !w.linux)
	if ok != startable && !w.isHarmed(c.id, c.pod.id) {
		w.t.Errorf("StartContainer %s (%s, pod stopped: %v): got success %v, want %v", c.id, c.kind, c.pod.stopped, ok, startable)
	}
	switch {
	case c.pod.stopped:
	case ok:
		c.state = running
		c.ordered = false
	default:
		c.state = exited
	}
	w.expect(c, c.state)
}

func (w *worker) stop(c *container) {
	grace := int64(w.rng.IntN(3))
	ok := w.do("StopContainer "+c.id, nil, func(ctx context.Context) error {
		_, err := w.cri.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: c.id, Timeout: grace})
		return err
	})
	if ok && !c.pod.shared {
		c.ordered = true
		if c.state == running {
			c.state = exited
		}
		w.expect(c, c.state)
	}
}

func (w *worker) remove(c *container) {
	if w.do("RemoveContainer "+c.id, nil, func(ctx context.Context) error {
		_, err := w.cri.RemoveContainer(ctx, &runtimeapi.RemoveContainerRequest{ContainerId: c.id})
		return err
	}) {
		w.cycles.Add(1)
		c.pod.drop(c)
		_, err, answered := w.status(c)
		if answered && status.Code(err) != codes.NotFound {
			w.t.Errorf("ContainerStatus of %s after its removal: got error %v, want NotFound", c.id, err)
		}
	}
}

func (w *worker) stopPod(p *pod) {
	p.mu.Lock()
	id, containers := p.id, p.containers
	p.mu.Unlock()
	if w.do("StopPodSandbox "+p.name, nil, func(ctx context.Context) error {
		_, err := w.cri.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
		return err
	}) && !p.shared {
		p.stopped = true
		for _, c := range containers {
			c.ordered = true
			if c.state == running {
				c.state = exited
			}
			w.expect(c, c.state)
		}
	}
}

func (w *worker) removePod(p *pod) {
	p.mu.Lock()
	id := p.id
	p.mu.Unlock()
	if w.do("RemovePodSandbox "+p.name, nil, func(ctx context.Context) error {
		_, err := w.cri.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
		return err
	}) {
		w.cycles.Add(1)
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.id == id {
			w.renew(p, w.rng)
		}
	}
}

func (w *worker) update(c *container) {
	w.do("UpdateContainerResources "+c.id, gone, func(ctx context.Context) error {
		_, err := w.cri.UpdateContainerResources(ctx, &runtimeapi.UpdateContainerResourcesRequest{
			ContainerId: c.id, Linux: &runtimeapi.LinuxContainerResources{CpuShares: 2 + w.rng.Int64N(1024), CpuQuota: 50000 + w.rng.Int64N(100000),
				CpuPeriod: 100000},
		})
		return err
	})
}

// execSync runs a program that answers, exceeds its timeout, or leaves a child that holds its stdio.
func (w *worker) execSync(c *container) {
	request := &runtimeapi.ExecSyncRequest{ContainerId: c.id, Cmd: []string{"echo", "hi"}, Timeout: 20}
	want, allowed := "hi\n", gone
	if w.linux {
		switch w.rng.IntN(4) {
		case 0:
			request.Cmd, request.Timeout, want, allowed = []string{"sleep", "3600"}, 1, "", append(gone, codes.DeadlineExceeded)
		case 1:
			request.Cmd = []string{"sh", "-c", "sleep 3600 & echo hi"}
		}
	}
	var got *runtimeapi.ExecSyncResponse
	if w.do("ExecSync "+c.id, allowed, func(ctx context.Context) (err error) {
		got, err = w.cri.ExecSync(ctx, request)
		return err
	}) && got.ExitCode == 0 && string(got.Stdout) != want {
		w.t.Errorf("output of ExecSync %q: got %q, want %q", request.Cmd, got.Stdout, want)
	}
}

// stream runs a program or attaches to the container, and often disconnects abruptly.
func (w *worker) stream(c *container) {
	var url string
	allowed, stdin := append(gone, codes.Unimplemented), w.rng.IntN(2) == 0
	ok := w.do("Exec or Attach "+c.id, allowed, func(ctx context.Context) error {
		if w.rng.IntN(2) == 0 {
			resp, err := w.cri.Attach(ctx, &runtimeapi.AttachRequest{ContainerId: c.id, Stdout: true, Stderr: true})
			url = resp.GetUrl()
			return err
		}
		resp, err := w.cri.Exec(ctx, &runtimeapi.ExecRequest{ContainerId: c.id, Cmd: []string{"cat"}, Stdin: stdin, Stdout: true, Stderr: true})
		url = resp.GetUrl()
		return err
	})
	if !ok {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(1+w.rng.IntN(500))*time.Millisecond)
	defer cancel()
	o := remotecommand.StreamOptions{Stdout: io.Discard, Stderr: io.Discard}
	if stdin && strings.Contains(url, "/exec/") {
		o.Stdin = strings.NewReader("hello")
	}
	// Any end of the stream is right, because the container, the client or the daemon can end.
	protocol, began := harness.Protocols[w.rng.IntN(2)], time.Now()
	_, err := harness.Stream(ctx, protocol, url, o)
	if took := time.Since(began); took > slow {
		w.t.Logf("%s %s stream over %s took %v: %v", clock(), w.name, protocol, took, err)
	}
}

// rotate renames the log file and has the daemon open a new one, as a kubelet does.
func (w *worker) rotate(c *container) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if os.Rename(c.log, fmt.Sprintf("%s.%d", c.log, c.rotations+1)) == nil {
		c.rotations++
	}
	w.do("ReopenContainerLog "+c.id, append(gone, codes.Unimplemented), func(ctx context.Context) error {
		_, err := w.cri.ReopenContainerLog(ctx, &runtimeapi.ReopenContainerLogRequest{ContainerId: c.id})
		return err
	})
}

// images pulls or removes an image that no pod uses.
func (w *worker) images() {
	spec := &runtimeapi.ImageSpec{Image: harness.Config}
	if w.rng.IntN(2) == 0 {
		w.do("PullImage", nil, func(ctx context.Context) error {
			_, err := w.img.PullImage(ctx, &runtimeapi.PullImageRequest{Image: spec})
			return err
		})
		return
	}
	w.do("RemoveImage", nil, func(ctx context.Context) error {
		_, err := w.img.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: spec})
		return err
	})
}

// look makes a random call that changes nothing.
func (w *worker) look(p *pod) {
	p.mu.Lock()
	id := p.id
	p.mu.Unlock()
	calls := map[string]func(context.Context) error{
		"PodSandboxStatus": func(ctx context.Context) error {
			_, err := w.cri.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
			return err
		},
		"PodSandboxStats": func(ctx context.Context) error {
			_, err := w.cri.PodSandboxStats(ctx, &runtimeapi.PodSandboxStatsRequest{PodSandboxId: id})
			return err
		},
		"ListPodSandboxStats": func(ctx context.Context) error {
			_, err := w.cri.ListPodSandboxStats(ctx, &runtimeapi.ListPodSandboxStatsRequest{})
			return err
		},
		"ListContainerStats": func(ctx context.Context) error {
			_, err := w.cri.ListContainerStats(ctx, &runtimeapi.ListContainerStatsRequest{})
			return err
		},
		"ListContainers": func(ctx context.Context) error {
			_, err := w.cri.ListContainers(ctx, &runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{PodSandboxId: id}})
			return err
		},
		"ListImages": func(ctx context.Context) error {
			_, err := w.img.ListImages(ctx, &runtimeapi.ListImagesRequest{})
			return err
		},
		"ImageFsInfo": func(ctx context.Context) error {
			_, err := w.img.ImageFsInfo(ctx, &runtimeapi.ImageFsInfoRequest{})
			return err
		},
		"Status": func(ctx context.Context) error {
			_, err := w.cri.Status(ctx, &runtimeapi.StatusRequest{Verbose: true})
			return err
		},
	}
	names := []string{"PodSandboxStatus", "PodSandboxStats", "ListPodSandboxStats", "ListContainerStats", "ListContainers", "ListImages",
		"ImageFsInfo", "Status"}
	name := names[w.rng.IntN(len(names))]
	w.do(name, gone, calls[name])
}

// status gets a container's status.
func (w *worker) status(c *container) (got *runtimeapi.ContainerStatus, err error, answered bool) {
	err, answered = w.call(w.rng, w.name+" ContainerStatus "+c.id, []codes.Code{codes.NotFound}, func(ctx context.Context) error {
		resp, err := w.cri.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: c.id, Verbose: w.rng.IntN(4) == 0})
		got = resp.GetStatus()
		return err
	})
	return got, err, answered
}

func (w *worker) statusOf(c *container) {
	w.expect(c, c.state)
	w.do("ContainerStats "+c.id, gone, func(ctx context.Context) error {
		_, err := w.cri.ContainerStats(ctx, &runtimeapi.ContainerStatsRequest{ContainerId: c.id})
		return err
	})
}

// expect compares a container of the worker's own pod with the model. A container that ends by itself may have ended.
func (w *worker) expect(c *container, want runtimeapi.ContainerState) {
	if c.pod.shared {
		return
	}
	c.state = want
	got, err, answered := w.status(c)
	switch {
	case !answered || w.isHarmed(c.id, c.pod.id):
	case err != nil:
		w.t.Errorf("ContainerStatus of %s (%s): got error %v, want state %s", c.id, c.kind, err, want)
	case got.State == exited && want == running && c.ends:
		c.state = exited
	case got.State != want:
		w.t.Errorf("%s state of container %s (%s): got %s (%s, %d, %s), want %s", clock(), c.id, c.kind, got.State, got.Reason, got.ExitCode,
			got.Message, want)
	}
}
