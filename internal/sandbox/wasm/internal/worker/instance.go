package worker

import (
	"context"
	"fmt"
	"io"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wasihttp"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// Bounds of one guest beside its memory and time.
const (
	maxTableElements = 1 << 20
	maxHandles       = 10_000
	// maxHostCalls is how often a guest calls the host without new work: between two messages of its client, say.
	maxHostCalls = 10_000_000
)

// guest is an instance with what the worker made for it.
type guest struct {
	*engine.Instance
	stdio stdio
	call  *grpcCall         // of the gRPC world
	http  *wasihttp.Session // of the HTTP world
	state *wasi.State       // of the others
}

// stdio is where one instance writes.
type stdio struct{ out, err io.WriteCloser }

func (o *output) stdio() stdio { return stdio{o.stream(false), o.stream(true)} }

// flush writes the beginnings of lines that the guest left.
func (s stdio) flush() { _, _ = s.out.Close(), s.err.Close() }

// instantiate makes an instance for the pod's world. There are no more than its requests can need: guests that slept when
// they were killed stay, with a thread each, until they wake up, and are not to pile up.
func (p *pod) instantiate(ctx context.Context, limits workerapi.Limits) (*guest, error) {
	if most := 2*limits.Concurrency + maxIdle; p.account.Instances() >= most {
		return nil, fmt.Errorf("%d instances of the component are there, some of them asleep: %w", most, errdefs.ErrResourceExhausted)
	}
	g := &guest{stdio: p.output.stdio()}
	options := engine.InstanceOptions{
		Args: p.spec.Args, Env: p.spec.Env, Preopens: p.preopens, Stdout: g.stdio.out, Stderr: g.stdio.err,
		MaxTableElements: maxTableElements, MaxHandles: maxHandles, MaxHostCalls: maxHostCalls,
		Deadline: limits.RequestTimeout, Account: p.account, // which has the memory limit
	}
	if p.code.world() == engine.WorldCommand {
		if p.stdin != nil {
			options.Stdin = p.stdin
		}
		if err := p.giveChannels(&options); err != nil {
			g.release()
			return nil, err
		}
	}
	own := p.wasiOptions(options)
	if p.code.engine.Path() == engine.PathComponent { // it finds these there, and not in the engine's WASI
		options.Stdin, options.Preopens = nil, nil
	}
	switch p.code.world() {
	case engine.WorldGRPC:
		g.state = wasi.NewState(own)
		g.call = &grpcCall{state: g.state}
		options.Host = g.call
	case engine.WorldHTTP:
		g.http = wasihttp.NewSession(own)
		options.Host = g.http
	case engine.WorldCommand:
		g.state = wasi.NewState(own)
		options.Host = &channelGuest{g.state, p.channels}
	}
	var err error
	if g.Instance, err = p.code.engine.Instantiate(ctx, options); err != nil {
		g.release()
		return nil, err
	}
	return g, nil
}

// giveChannels lets a command find its channels: modules in /ch, components by their own interface.
func (p *pod) giveChannels(o *engine.InstanceOptions) error {
	switch {
	case p.channels == nil:
		return nil
	case p.code.engine.Component():
		return p.channels.stdio(p.alive, o)
	}
	o.Channels = p.channels
	return nil
}

// Close releases the instance.
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

// preopens reaches the directories that came as descriptors.
func preopens(mounts []workerapi.Mount) []engine.Preopen {
	list := make([]engine.Preopen, len(mounts))
	for i, m := range mounts {
		list[i] = engine.Preopen{Path: fmt.Sprintf("/proc/self/fd/%d", m.Dir.Fd()), Guest: m.Guest, ReadOnly: m.ReadOnly}
	}
	return list
}

// wasiOptions are the world of an instance as our own WASI 0.2 has it.
func (p *pod) wasiOptions(o engine.InstanceOptions) wasi.Options {
	own := wasi.Options{Stdin: o.Stdin, Stdout: o.Stdout, Stderr: o.Stderr,
		Files: quota{p.account, engine.HeldFiles}, Bytes: quota{p.account, engine.HeldBytes}}
	for _, d := range o.Preopens {
		own.Preopens = append(own.Preopens, wasi.Preopen{Path: d.Path, Guest: d.Guest, ReadOnly: d.ReadOnly})
	}
	return own
}

// quota is a pod's share of a kind.
type quota struct {
	account *engine.Account
	what    engine.Held
}

// Take implements wasi.Quota.
func (q quota) Take(n int64) bool { return q.account.Take(q.what, n) }

// Give implements wasi.Quota.
func (q quota) Give(n int64) { q.account.Give(q.what, n) }

// checkMounts refuses mounts that no guest can have.
func checkMounts(mounts []workerapi.Mount) error {
	for _, m := range mounts {
		if m.Dir.File == nil || len(m.Guest) == 0 || m.Guest[0] != '/' {
			return fmt.Errorf("mount %q: no directory came along, or the path is not absolute: %w", m.Guest, errdefs.ErrInvalidArgument)
		}
	}
	return nil
}
