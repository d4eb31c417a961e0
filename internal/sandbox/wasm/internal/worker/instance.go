package worker

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wasihttp"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// Limits on one guest, besides those on its memory and time.
const (
	maxTableElements = 1 << 20
	maxHandles       = 10_000
	// maxHostCalls bounds a guest's calls to the host between two messages from its client.
	maxHostCalls = 10_000_000
)

// guest is an instance with its host-side state.
type guest struct {
	*engine.Instance
	stdio stdio
	call  *grpcCall         // in the gRPC worlds
	http  *wasihttp.Session // in the HTTP world
	state *wasi.State       // in all worlds but the HTTP world

	served         int // requests
	begun, expires time.Time
}

// stdio is an instance's standard output and standard error.
type stdio struct{ out, err io.WriteCloser }

func (o *output) stdio() stdio { return stdio{o.stream(false), o.stream(true)} }

// flush writes unfinished lines to the log.
func (s stdio) flush() { _, _ = s.out.Close(), s.err.Close() }

// instantiate makes an instance for the pod's world. The number of instances is bounded, because a guest that is killed
// while it sleeps keeps its thread until it wakes up.
func (p *pod) instantiate(ctx context.Context, limits workerapi.Limits) (*guest, error) {
	if limit := 2*limits.Concurrency + maxIdle; p.account.Instances() >= limit {
		return nil, fmt.Errorf("the component has reached its limit of %d instances, which includes killed ones that are still asleep: %w", limit,
			errdefs.ErrResourceExhausted)
	}
	g := &guest{stdio: p.output.stdio(), begun: time.Now()}
	options := engine.InstanceOptions{
		Args: p.spec.Args, Env: p.spec.Env, Preopens: p.preopens, Stdout: g.stdio.out, Stderr: g.stdio.err,
		MaxTableElements: maxTableElements, MaxHandles: maxHandles, MaxHostCalls: maxHostCalls,
		Deadline: limits.RequestTimeout, Account: p.account, // the account enforces the memory limit
	}
	if p.code.World == engine.WorldCommand {
		if p.stdin != nil {
			options.Stdin = p.stdin
		}
		if err := p.setChannels(&options); err != nil {
			g.release()
			return nil, err
		}
	}
	own := p.wasiOptions(options)
	if p.code.engine.Path() == engine.PathComponent { // this path uses Tripod's WASI (own), not the engine's
		options.Stdin, options.Preopens = nil, nil
	}
	switch p.code.World {
	case engine.WorldGRPC, engine.WorldRaw:
		g.state = wasi.NewState(own)
		g.call = &grpcCall{state: g.state}
		if p.egress != nil {
			g.call.outgoing.transport = grpcEgress{p.egress}
		}
		options.Host = g.call
	case engine.WorldHTTP:
		g.http = wasihttp.NewSession(own)
		options.Host = g.http
	case engine.WorldCommand, engine.WorldMessages:
		g.state = wasi.NewState(own)
		options.Host = &channelGuest{g.state, p.channels}
	}
	options.Snapshot, options.Capture = p.snapshots.get(limits.Snapshot)
	var err error
	if g.Instance, err = p.code.engine.Instantiate(ctx, options); err != nil {
		if options.Capture {
			p.snapshots.failed(ctx, err)
		}
		g.release()
		return nil, err
	}
	if options.Capture {
		if !p.snapshots.make(ctx, g, limits) {
			g.Close()
			return p.instantiate(ctx, limits)
		}
	}
	return g, nil
}

// setChannels gives a command its channels: a core module finds them in /ch, and a component's standard streams are
// connected to the channels stdin, stdout and stderr. Components open other channels through channelHost.
func (p *pod) setChannels(o *engine.InstanceOptions) error {
	switch {
	case p.channels == nil:
		return nil
	case p.code.engine.Component():
		return p.channels.stdio(p.alive, o)
	}
	o.Channels = p.channels
	return nil
}

// Close closes the instance and its host-side state.
func (g *guest) Close() {
	g.Instance.Close()
	g.release()
}

func (g *guest) release() {
	if g.http != nil {
		g.http.Close()
	}
	if g.state != nil {
		g.state.Close()
	}
	g.stdio.flush()
}

// configVolumes returns the directories whose files are values of wasi:config, in the order of their paths in the guest.
func configVolumes(mounts []workerapi.Mount) []string {
	var list []string
	for _, m := range slices.SortedFunc(slices.Values(mounts), func(a, b workerapi.Mount) int { return strings.Compare(a.Guest, b.Guest) }) {
		if m.Config {
			list = append(list, hostPath(m.Dir))
		}
	}
	return list
}

// blobs returns the store for wasi:blobstore, or nil.
func blobs(mounts []workerapi.Mount) *wasi.Blobs {
	i := slices.IndexFunc(mounts, func(m workerapi.Mount) bool { return m.Blobs })
	if i < 0 {
		return nil
	}
	return wasi.NewBlobs(hostPath(mounts[i].Dir))
}

// hostPath returns the path of a directory, as the descriptor that the daemon passed.
func hostPath(dir workerapi.File) string { return fmt.Sprintf("/proc/self/fd/%d", dir.Fd()) }

// preopens returns the guest's directories.
func preopens(mounts []workerapi.Mount) []engine.Preopen {
	list := make([]engine.Preopen, len(mounts))
	for i, m := range mounts {
		list[i] = engine.Preopen{Path: hostPath(m.Dir), Guest: m.Guest, ReadOnly: m.ReadOnly}
	}
	return list
}

// wasiOptions converts the engine's options to options of package wasi, Tripod's own WASI 0.2 host.
func (p *pod) wasiOptions(o engine.InstanceOptions) wasi.Options {
	own := wasi.Options{Args: o.Args, Env: o.Env, Stdin: o.Stdin, Stdout: o.Stdout, Stderr: o.Stderr,
		Files: quota{p.account, engine.HeldFiles}, Bytes: quota{p.account, engine.HeldBytes}, Guard: p.guard,
		Config: wasi.Config{Env: p.spec.Env, Volumes: p.configVolumes}, Blobs: p.blobs, Store: p.store, Log: p.output.logEntry}
	if p.messages != nil {
		own.Messages = p.messages
	}
	if p.egress != nil {
		own.HTTP, own.Network = p.egress, &network{p.egress}
	}
	for _, d := range o.Preopens {
		own.Preopens = append(own.Preopens, wasi.Preopen(d))
	}
	return own
}

// guard implements wasi.Options.Guard.
func (p *pod) guard(where string, f func() error) error {
	return guard.Call(p.worker.logger.With("pod", p.spec.ID), where, f)
}

// quota is a wasi.Quota that charges a pod's account.
type quota struct {
	account *engine.Account
	what    engine.Held
}

// Take implements wasi.Quota.
func (q quota) Take(n int64) bool { return q.account.Take(q.what, n) }

// Give implements wasi.Quota.
func (q quota) Give(n int64) { q.account.Give(q.what, n) }

// checkMounts refuses mounts without a directory or with a relative guest path.
func checkMounts(mounts []workerapi.Mount) error {
	for _, m := range mounts {
		if m.Dir.File == nil || len(m.Guest) == 0 || m.Guest[0] != '/' {
			return fmt.Errorf("mount %q: no directory was passed, or the path is not absolute: %w", m.Guest, errdefs.ErrInvalidArgument)
		}
	}
	return nil
}
