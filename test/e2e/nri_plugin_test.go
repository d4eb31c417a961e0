package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"sigs.k8s.io/yaml"

	"github.com/tripod-run/tripod/test/harness"
)

// nriEvent is a call that a plugin received. It has the name of a container only if it concerns one.
type nriEvent struct{ call, pod, container, name string }

// nriPlugin is a plugin of the node that records its calls. The functions are optional; set them before connecting.
type nriPlugin struct {
	stub stub.Stub

	// on is called in every call except Synchronize, and its error is the plugin's answer.
	on       func(ctx context.Context, e nriEvent) error
	onSync   func(ctx context.Context)
	onCreate func(*api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate)
	onUpdate func(*api.Container, *api.LinuxResources) []*api.ContainerUpdate

	mu         sync.Mutex
	events     []nriEvent
	containers map[string]*api.Container // as last seen, by ID
	pods       map[string]*api.PodSandbox
	synced     []string      // the IDs of the pods and containers in Synchronize
	began      chan struct{} // closed when Synchronize begins
	closed     chan struct{} // closed when the connection ends
}

// connectPlugin connects a plugin to a daemon, and disconnects it at the end of the test.
func connectPlugin(t *testing.T, d *harness.Daemon, index, name string, p *nriPlugin) *nriPlugin {
	t.Helper()
	if err := startPlugin(d, index, name, p); err != nil {
		t.Fatalf("connect the plugin: %v", err)
	}
	t.Cleanup(p.stub.Stop)
	return p
}

// startPlugin connects a plugin. From its return on, the plugin gets all calls.
func startPlugin(d *harness.Daemon, index, name string, p *nriPlugin) (err error) {
	p.containers, p.pods, p.began, p.closed = map[string]*api.Container{}, map[string]*api.PodSandbox{}, make(chan struct{}),
		make(chan struct{})
	p.stub, err = stub.New(p, stub.WithPluginIdx(index), stub.WithPluginName(name), stub.WithSocketPath(d.NRISocket()),
		stub.WithOnClose(sync.OnceFunc(func() { close(p.closed) })))
	if err != nil {
		return err
	}
	if err := p.stub.Start(context.Background()); err != nil {
		return err
	}
	select {
	case <-p.began:
		return nil
	case <-time.After(waitLimit):
		return errors.New("the daemon does not synchronise the plugin")
	}
}

func (p *nriPlugin) record(ctx context.Context, call string, pod *api.PodSandbox, c *api.Container) error {
	e := nriEvent{call, pod.GetId(), c.GetId(), c.GetName()}
	p.mu.Lock()
	p.events = append(p.events, e)
	p.pods[pod.GetId()] = pod
	if c != nil {
		p.containers[c.GetId()] = c
	}
	p.mu.Unlock()
	if p.on != nil {
		return p.on(ctx, e)
	}
	return nil
}

// calls lists the calls for a pod or container so far, in their order.
func (p *nriPlugin) calls(id string) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var calls []string
	for _, e := range p.events {
		if e.container == id || e.container == "" && e.pod == id {
			calls = append(calls, e.call)
		}
	}
	return calls
}

func (p *nriPlugin) container(id string) *api.Container {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.containers[id]
}

func (p *nriPlugin) pod(id string) *api.PodSandbox {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pods[id]
}

// waitCalls waits until the calls for a pod or container are exactly these.
func (p *nriPlugin) waitCalls(t *testing.T, id string, want ...string) {
	t.Helper()
	harness.Eventually(t, waitLimit, func() error {
		if got := p.calls(id); !slices.Equal(got, want) {
			return fmt.Errorf("calls for %s: got %s, want %s", id, strings.Join(got, " "), strings.Join(want, " "))
		}
		return nil
	})
}

// seen counts how often the plugin learned of a new pod or container: in Synchronize, or by a call.
func (p *nriPlugin) seen(id string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, synced := range p.synced {
		if synced == id {
			n++
		}
	}
	for _, e := range p.events {
		if e.call == "CreateContainer" && e.container == id {
			n++
		}
	}
	return n
}

func (p *nriPlugin) Synchronize(ctx context.Context, pods []*api.PodSandbox, containers []*api.Container) ([]*api.ContainerUpdate, error) {
	p.mu.Lock()
	for _, pod := range pods {
		p.synced, p.pods[pod.GetId()] = append(p.synced, pod.GetId()), pod
	}
	for _, c := range containers {
		p.synced, p.containers[c.GetId()] = append(p.synced, c.GetId()), c
	}
	p.mu.Unlock()
	close(p.began)
	if p.onSync != nil {
		p.onSync(ctx)
	}
	return nil, nil
}

func (p *nriPlugin) RunPodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	return p.record(ctx, "RunPodSandbox", pod, nil)
}

func (p *nriPlugin) UpdatePodSandbox(ctx context.Context, pod *api.PodSandbox, _, _ *api.LinuxResources) error {
	return p.record(ctx, "UpdatePodSandbox", pod, nil)
}

func (p *nriPlugin) PostUpdatePodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	return p.record(ctx, "PostUpdatePodSandbox", pod, nil)
}

func (p *nriPlugin) StopPodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	return p.record(ctx, "StopPodSandbox", pod, nil)
}

func (p *nriPlugin) RemovePodSandbox(ctx context.Context, pod *api.PodSandbox) error {
	return p.record(ctx, "RemovePodSandbox", pod, nil)
}

func (p *nriPlugin) CreateContainer(ctx context.Context, pod *api.PodSandbox,
	c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	if err := p.record(ctx, "CreateContainer", pod, c); err != nil || p.onCreate == nil {
		return nil, nil, err
	}
	adjustment, updates := p.onCreate(pod, c)
	return adjustment, updates, nil
}

func (p *nriPlugin) PostCreateContainer(ctx context.Context, pod *api.PodSandbox, c *api.Container) error {
	return p.record(ctx, "PostCreateContainer", pod, c)
}

func (p *nriPlugin) StartContainer(ctx context.Context, pod *api.PodSandbox, c *api.Container) error {
	return p.record(ctx, "StartContainer", pod, c)
}

func (p *nriPlugin) PostStartContainer(ctx context.Context, pod *api.PodSandbox, c *api.Container) error {
	return p.record(ctx, "PostStartContainer", pod, c)
}

func (p *nriPlugin) UpdateContainer(ctx context.Context, pod *api.PodSandbox, c *api.Container,
	r *api.LinuxResources) ([]*api.ContainerUpdate, error) {
	if err := p.record(ctx, "UpdateContainer", pod, c); err != nil || p.onUpdate == nil {
		return nil, err
	}
	return p.onUpdate(c, r), nil
}

func (p *nriPlugin) PostUpdateContainer(ctx context.Context, pod *api.PodSandbox, c *api.Container) error {
	return p.record(ctx, "PostUpdateContainer", pod, c)
}

func (p *nriPlugin) StopContainer(ctx context.Context, pod *api.PodSandbox, c *api.Container) ([]*api.ContainerUpdate, error) {
	return nil, p.record(ctx, "StopContainer", pod, c)
}

func (p *nriPlugin) RemoveContainer(ctx context.Context, pod *api.PodSandbox, c *api.Container) error {
	return p.record(ctx, "RemoveContainer", pod, c)
}

// installedPlugin is what this program does if the daemon starts it as a plugin: "logger" writes its calls to the file
// in its configuration, and "injector" adds the devices in the pods' annotations.
func installedPlugin(name string) int {
	plugin := map[string]stub.Plugin{"logger": &fileLogger{}, "injector": injector{}}[name]
	s, err := stub.New(plugin)
	if err == nil {
		err = s.Run(context.Background())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// fileLogger is a plugin that writes a line about each call.
type fileLogger struct{ file string }

func (l *fileLogger) Configure(_ context.Context, config, runtime, version string) (stub.EventMask, error) {
	l.file = strings.TrimSpace(config)
	return 0, nil // all that it handles
}

func (l *fileLogger) log(format string, args ...any) error {
	f, err := os.OpenFile(l.file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = fmt.Fprintf(f, format+"\n", args...)
	return err
}

func (l *fileLogger) RunPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	return l.log("RunPodSandbox %s", pod.GetName())
}

func (l *fileLogger) StopPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	return l.log("StopPodSandbox %s", pod.GetName())
}

func (l *fileLogger) RemovePodSandbox(_ context.Context, pod *api.PodSandbox) error {
	return l.log("RemovePodSandbox %s", pod.GetName())
}

func (l *fileLogger) StartContainer(_ context.Context, _ *api.PodSandbox, c *api.Container) error {
	return l.log("StartContainer %s %v", c.GetName(), c.GetArgs())
}

// injector is a plugin that adds the devices in the annotation devices.nri.io/container.NAME of a pod to its container.
type injector struct{}

func (injector) CreateContainer(_ context.Context, pod *api.PodSandbox,
	c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	var devices []struct {
		Path, Type   string
		Major, Minor int64
	}
	if err := yaml.Unmarshal([]byte(pod.GetAnnotations()["devices.nri.io/container."+c.GetName()]), &devices); err != nil {
		return nil, nil, err
	}
	adjustment := &api.ContainerAdjustment{}
	for _, d := range devices {
		adjustment.AddDevice(&api.LinuxDevice{Path: d.Path, Type: d.Type, Major: d.Major, Minor: d.Minor, FileMode: api.FileMode(0o666)})
	}
	return adjustment, nil, nil
}
