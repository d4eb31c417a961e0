package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/play"
)

// DefaultVolumeDir is where `run -f` keeps the volumes of its pods.
const DefaultVolumeDir = "/var/lib/tripod-volumes"

// undoTimeout bounds the removal of what a failed command has made, besides the time that containers get to end.
const undoTimeout = 30 * time.Second

// manifestOptions are the flags of `run -f`.
type manifestOptions struct {
	file         string
	wait, remove bool
	initTimeout  time.Duration
	volumeDir    string
	logDir       string
}

func (a *App) manifestFlags(c *cobra.Command, m *manifestOptions) {
	f := c.Flags()
	f.StringVarP(&m.file, "file", "f", "", "run the Pods of this file of Kubernetes manifests; -: standard input")
	f.BoolVar(&m.wait, "wait", false, "wait until the containers have ended, and exit with the code of the first that failed")
	f.BoolVar(&m.remove, "rm", false, "wait as well, and remove the pods then, or when interrupted")
	f.DurationVar(&m.initTimeout, "init-timeout", 10*time.Minute, "with -f: time limit of an init container")
	f.StringVar(&m.volumeDir, "volume-dir", DefaultVolumeDir, "with -f: parent of the directories with the pods' volumes")
	a.OutputFlag(c)
	for _, other := range []string{"name", "runtime", "host-network", "userns", "command", "tty", "interactive", "env", "annotation",
		"publish", "volume",
		"entrypoint", "workdir", "user", "privileged"} {
		c.MarkFlagsMutuallyExclusive("file", other)
	}
	for _, waits := range []string{"wait", "rm"} {
		c.MarkFlagsMutuallyExclusive("detach", waits)
	}
}

// runFile implements `run -f`.
func (a *App) runFile(c *cobra.Command, args []string, m manifestOptions) error {
	if len(args) > 0 {
		return fmt.Errorf("takes no arguments with -f: %w", errdefs.ErrInvalidArgument)
	}
	pods, err := a.planManifests(m)
	if err != nil {
		return err
	}
	return a.withClient(c, func(ctx context.Context, client *Client) error { return a.runManifests(ctx, client, m, pods) })
}

// played is a pod of `run -f`, with what of it exists on the node.
type played struct {
	*play.Pod
	id       string                       // empty: no sandbox yet
	doubtful bool                         // the call that makes the sandbox was given up, and may yet succeed
	images   map[string]*runtimeapi.Image // by the containers' names
	running  []playedContainer            // in the order of their starts
}

type playedContainer struct {
	*play.Container
	id string
}

// runManifests runs the pods of a file. If a step fails, it removes all of them.
func (a *App) runManifests(ctx context.Context, client *Client, o manifestOptions, pods []*played) error {
	err := a.startAll(ctx, client, o, pods)
	if err != nil {
		return errors.Join(err, undo(ctx, client, o, pods))
	}
	if err := a.printPlayed(ctx, client, pods); err != nil || !o.wait && !o.remove {
		return err
	}
	err = waitForAll(ctx, client, pods)
	if o.remove {
		err = errors.Join(err, undo(ctx, client, o, pods))
	}
	return err
}

func (a *App) planManifests(o manifestOptions) (pods []*played, err error) {
	var text []byte
	if o.file == "-" {
		text, err = io.ReadAll(a.Stdin)
	} else {
		text, err = os.ReadFile(o.file)
	}
	if err != nil {
		return nil, err
	}
	manifests, err := play.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", o.file, err)
	}
	node, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	planned, err := manifests.Plan(play.Options{NewUID: randomUID, NodeName: strings.ToLower(node), LogDir: o.logDir, VolumeDir: o.volumeDir})
	for _, p := range planned {
		pods = append(pods, &played{Pod: p, images: map[string]*runtimeapi.Image{}})
		if len(p.Ignored) > 0 {
			fmt.Fprintf(a.Stderr, "tripod run: warning: pod %s: no effect without a cluster: %s\n", p.Name(), strings.Join(p.Ignored, ", "))
		}
	}
	return pods, err
}

// startAll pulls all images first, because most errors are there and nothing has been made yet.
func (a *App) startAll(ctx context.Context, client *Client, o manifestOptions, pods []*played) error {
	if err := checkNames(ctx, client, o, pods); err != nil {
		return err
	}
	for _, p := range pods {
		for _, c := range p.Containers {
			image, err := a.playImage(ctx, client, c, p.Handler)
			if err != nil {
				return fmt.Errorf("pod %s: image of container %s: %w", p.Name(), c.Name, err)
			}
			p.images[c.Name] = image
		}
	}
	for _, p := range pods {
		if err := p.start(ctx, client, o); err != nil {
			return fmt.Errorf("pod %s: %w", p.Name(), err)
		}
	}
	return nil
}

// checkNames refuses names that pods of the node have, and removes the volumes of pods that are gone.
func checkNames(ctx context.Context, client *Client, o manifestOptions, pods []*played) error {
	all, err := client.ListPodSandbox(ctx, nil)
	if err != nil {
		return err
	}
	uids := map[string]bool{}
	for _, other := range all {
		uids[other.GetMetadata().GetUid()] = true
		for _, p := range pods {
			if name := other.GetMetadata().GetNamespace() + "/" + other.GetMetadata().GetName(); name == p.Name() {
				return fmt.Errorf("pod %s exists: %s; remove it with `tripod rmp`: %w", name, shortID(other.GetId()), errdefs.ErrAlreadyExists)
			}
		}
	}
	return play.SweepVolumes(o.volumeDir, func(uid string) bool { return uids[uid] })
}

// playImage pulls the container's image by its policy and returns it.
func (a *App) playImage(ctx context.Context, client *Client, c *play.Container, handler string) (*runtimeapi.Image, error) {
	spec := &runtimeapi.ImageSpec{Image: c.Image, RuntimeHandler: handler}
	image, err := client.imageStatus(ctx, spec)
	if err != nil {
		return nil, err
	}
	if image == nil && c.Pull == corev1.PullNever {
		return nil, fmt.Errorf("%s is not on the node, and imagePullPolicy is Never: %w", c.Image, errdefs.ErrNotFound)
	}
	if image == nil || c.Pull == corev1.PullAlways {
		if _, err := a.pull(ctx, client, spec, nil); err != nil {
			return nil, err
		}
		if image, err = client.imageStatus(ctx, spec); err != nil {
			return nil, err
		}
	}
	if c.NonRoot {
		if err := checkNonRoot(image); err != nil {
			return nil, err
		}
	}
	return image, nil
}

// checkNonRoot checks the user of an image as a kubelet does.
func checkNonRoot(image *runtimeapi.Image) error {
	switch {
	case image.GetUid() != nil && image.GetUid().GetValue() != 0:
		return nil
	case image.GetUid() == nil && image.GetUsername() != "":
		return fmt.Errorf("its user %q is not a number, which runAsNonRoot needs; set runAsUser: %w", image.GetUsername(),
			errdefs.ErrFailedPrecondition)
	}
	return fmt.Errorf("its user is root, with runAsNonRoot: %w", errdefs.ErrFailedPrecondition)
}

// start makes the pod and starts its containers.
func (p *played) start(ctx context.Context, client *Client, o manifestOptions) error {
	ips, err := p.runSandbox(ctx, client, o)
	if err != nil {
		return err
	}
	for _, c := range p.Containers {
		if err := p.startContainer(ctx, client, c, ips, o.initTimeout); err != nil {
			return fmt.Errorf("%s: %w", c.Name, err)
		}
	}
	return nil
}

// runSandbox makes the pod's volumes and its sandbox, and returns its addresses.
func (p *played) runSandbox(ctx context.Context, client *Client, o manifestOptions) ([]string, error) {
	release, err := play.LockVolumes(o.volumeDir)
	if err != nil {
		return nil, err
	}
	defer release()
	if err := p.MakeVolumes(); err != nil {
		return nil, fmt.Errorf("volumes: %w", err)
	}
	if p.id, err = client.RunPodSandbox(ctx, p.Sandbox, p.Handler); err != nil {
		code := status.Code(err)
		p.doubtful = ctx.Err() != nil || code == codes.DeadlineExceeded || code == codes.Unavailable
		return nil, fmt.Errorf("RunPodSandbox: %w", err)
	}
	resp, err := client.PodSandboxStatus(ctx, p.id, false)
	if err != nil {
		return nil, fmt.Errorf("PodSandboxStatus: %w", err)
	}
	var ips []string
	if network := resp.GetStatus().GetNetwork(); network.GetIp() != "" {
		ips = append(ips, network.GetIp())
		for _, more := range network.GetAdditionalIps() {
			ips = append(ips, more.GetIp())
		}
	}
	if err := p.WriteHosts(ips); err != nil {
		return nil, fmt.Errorf("/etc/hosts: %w", err)
	}
	return ips, nil
}

// startContainer creates and starts a container. It waits for the end of an init container.
func (p *played) startContainer(ctx context.Context, client *Client, c *play.Container, ips []string, timeout time.Duration) error {
	id, err := client.CreateContainer(ctx, p.id, c.Config(p.images[c.Name], ips), p.Sandbox)
	if err != nil {
		return fmt.Errorf("CreateContainer: %w", err)
	}
	if err := client.StartContainer(ctx, id); err != nil {
		return fmt.Errorf("StartContainer: %w", err)
	}
	p.running = append(p.running, playedContainer{c, id})
	if c.Role != play.Init {
		return nil
	}
	limited, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	ended, err := waitForExit(limited, client, id)
	switch {
	case err != nil && ctx.Err() == nil && limited.Err() != nil:
		return fmt.Errorf("the init container has not ended after %s (--init-timeout): %w", timeout, errdefs.ErrUnavailable)
	case err != nil:
		return err
	case ended.GetExitCode() != 0:
		return fmt.Errorf("the init container has failed: %s; see its log %s: %w", endOf(ended), ended.GetLogPath(),
			errdefs.ErrFailedPrecondition)
	}
	return nil
}

// waitForExit waits for the end of a container and returns its status.
func waitForExit(ctx context.Context, client *Client, id string) (*runtimeapi.ContainerStatus, error) {
	waitForEnd(ctx, client, id)
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	resp, err := client.ContainerStatus(ctx, id, false)
	return resp.GetStatus(), err
}

func endOf(s *runtimeapi.ContainerStatus) string {
	text := "exit code " + strconv.Itoa(int(s.GetExitCode()))
	if s.GetReason() != "" {
		text += " (" + s.GetReason() + ")"
	}
	if s.GetMessage() != "" {
		text += ": " + strings.TrimSpace(s.GetMessage())
	}
	return text
}

// waitForAll waits until the regular containers of all pods have ended, and ends the sidecars of each pod after that. The
// error has the exit code of the first container that failed.
func waitForAll(ctx context.Context, client *Client, pods []*played) error {
	errs := make([]error, len(pods))
	var wg sync.WaitGroup
	for i, p := range pods {
		wg.Go(func() { errs[i] = p.wait(ctx, client) })
	}
	wg.Wait()
	return cmp.Or(errs...)
}

func (p *played) wait(ctx context.Context, client *Client) error {
	var failed error
	for _, c := range p.running {
		if c.Role != play.Regular {
			continue
		}
		ended, err := waitForExit(ctx, client, c.id)
		if err != nil {
			return fmt.Errorf("pod %s: %s: %w", p.Name(), c.Name, err)
		}
		if ended.GetExitCode() != 0 && failed == nil {
			failed = &ExitError{Code: int(ended.GetExitCode()),
				Err: fmt.Errorf("pod %s: container %s has failed: %s", p.Name(), c.Name, endOf(ended))}
		}
	}
	return errors.Join(failed, p.stop(ctx, client))
}

// stop ends the pod's containers within its grace period: first the regular ones, then the sidecars, the last one first.
func (p *played) stop(ctx context.Context, client *Client) error {
	deadline := time.Now().Add(p.Grace)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var all error
	stop := func(c playedContainer) {
		left := max(0, time.Until(deadline).Round(time.Second))
		err := client.StopContainer(ctx, c.id, int64(left/time.Second))
		mu.Lock()
		defer mu.Unlock()
		if status.Code(err) != codes.NotFound {
			all = errors.Join(all, err)
		}
	}
	for _, c := range p.running {
		if c.Role != play.Sidecar {
			wg.Go(func() { stop(c) })
		}
	}
	wg.Wait()
	for _, c := range slices.Backward(p.running) {
		if c.Role == play.Sidecar {
			stop(c)
		}
	}
	return all
}

// undo removes the pods and their volumes, even if ctx has ended.
func undo(ctx context.Context, client *Client, o manifestOptions, pods []*played) error {
	errs := make([]error, len(pods))
	var wg sync.WaitGroup
	for i, p := range pods {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.Grace+undoTimeout)
			defer cancel()
			if err := p.remove(ctx, client, o); err != nil {
				errs[i] = fmt.Errorf("pod %s could not be removed: %w", p.Name(), err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (p *played) remove(ctx context.Context, client *Client, o manifestOptions) error {
	if p.doubtful {
		// The repeated call waits for the first one. If it fails, no sandbox exists.
		p.id, _ = client.RunPodSandbox(ctx, p.Sandbox, p.Handler)
	}
	if p.id != "" {
		if err := errors.Join(p.stop(ctx, client), removePod(ctx, client, p.id, true, true)); err != nil {
			return err
		}
	}
	return play.RemoveVolumes(o.volumeDir, p.Sandbox.GetMetadata().GetUid())
}

// printPlayed prints the IDs of the pods, or the pods in another format.
func (a *App) printPlayed(ctx context.Context, client *Client, pods []*played) error {
	list := &runtimeapi.ListPodSandboxResponse{}
	a.quiet = a.quiet || a.asID()
	for _, p := range pods {
		found, err := client.ListPodSandbox(ctx, &runtimeapi.PodSandboxFilter{Id: p.id})
		if err != nil {
			return err
		}
		list.Items = append(list.Items, found...)
	}
	return a.printPods(ctx, client, list)
}
