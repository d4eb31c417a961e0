package worker

import (
	"context"
	_ "embed" // channels.wit
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wasihttp"
	"github.com/tripod-run/tripod/internal/component/wit"
)

//go:embed channels.wit
var channelsText string

// channelsInterface is the name, without the patch version, of the interface that components use instead of the
// directory /ch.
const channelsInterface = "tripod:edge/channels@0.1."

// The cases of the enum "error" in channels.wit.
const (
	channelNotFound = iota
	channelNotPermitted
	channelTooMany
	channelTooLong
	channelClosed
	channelIO
)

// channelGuest is the value of engine.InstanceOptions.Host for a command's instance.
type channelGuest struct {
	state    *wasi.State
	channels *channels // nil if the pod has none
}

// WASI implements wasihttp.Guest.
func (g *channelGuest) WASI() *wasi.State { return g.state }

// portResource is the WIT resource that represents an open channel.
type portResource struct {
	*port
	notifier
}

// Close closes the port. It is called when the guest drops the resource or ends.
func (h *portResource) Close() error {
	h.port.Close()
	return nil
}

// publish publishes a message. It waits until the node takes it, at most until ctx ends, and then returns ctx's cause.
func (h *portResource) publish(ctx context.Context, message []byte) error {
	for {
		err := h.Send(message)
		if !errors.Is(err, engine.ErrWait) {
			return err
		}
		if err := h.wait(ctx, time.Time{}); err != nil {
			return err
		}
	}
}

// next waits for a message, at most until ctx ends, and then returns ctx's cause. The error is io.EOF after the last message
// of a pod that is being stopped, and os.ErrDeadlineExceeded after the deadline, if that is not zero.
func (h *portResource) next(ctx context.Context, deadline time.Time) ([]byte, error) {
	for {
		message, err := h.Receive()
		if !errors.Is(err, engine.ErrWait) {
			return message, err
		}
		if !deadline.IsZero() && !time.Now().Before(deadline) {
			return nil, os.ErrDeadlineExceeded
		}
		if err := h.wait(ctx, deadline); err != nil {
			return nil, err
		}
	}
}

// notifier is a channel of capacity 1 that wakes its receiver.
type notifier chan struct{}

func (n notifier) wake() {
	select {
	case n <- struct{}{}:
	default:
	}
}

// wait returns when n.wake is called, after pollInterval, or at the deadline (zero means no deadline), whichever comes
// first. If ctx ends before that, wait returns ctx's cause. Callers must poll, because a full backlog accepts messages
// again after stallTimeout even if n.wake is not called.
func (n notifier) wait(ctx context.Context, deadline time.Time) error {
	const pollInterval = 200 * time.Millisecond
	d := pollInterval
	if !deadline.IsZero() {
		d = min(d, time.Until(deadline))
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-n:
	case <-timer.C:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}

// openFully opens the named channel in every mode that the channel's configuration allows.
func (c *channels) openFully(name string) (*port, notifier, error) {
	if c == nil {
		return nil, nil, fmt.Errorf("channel %q: the module has no channels: %w", name, errdefs.ErrNotFound)
	}
	flags, a := c.named[name].Flags, make(notifier, 1)
	p, err := c.open(name, flags.CanRead(), flags.CanWrite(), a.wake)
	return p, a, err
}

// channelHost returns the host functions for commands: WASI and channels.
var channelHost = sync.OnceValue(func() engine.Host {
	interfaces, err := wasi.ParseWIT(channelsText)
	if err != nil {
		panic(err) // the text is embedded; the tests parse it
	}
	i := interfaces[0]
	h := wasihttp.Host()
	h.Resources = append(h.Resources, engine.HostResource{Interface: i.Name, Name: i.Resources[0], Drop: func(host any, rep uint32) {
		host.(*channelGuest).state.Drop(rep)
	}})
	do := map[string]channelFunc{
		"[static]channel.open": channelOpen, "[method]channel.send": channelSend, "[method]channel.receive": channelReceive,
	}
	for _, f := range i.Funcs {
		h.Funcs = append(h.Funcs, engine.HostFunc{Interface: i.Name, Name: f.Name, Params: f.Params, Result: f.Result,
			Call: func(c *engine.HostCall, args []byte) ([]byte, error) {
				in := wit.NewReader(args)
				out, err := do[f.Name](c, c.Host().(*channelGuest), in)
				if err == nil {
					err = in.Err()
				}
				return out, err
			}})
	}
	return h
})

// channelFunc implements a function of the interface in channels.wit. An error ends the guest.
type channelFunc func(c *engine.HostCall, g *channelGuest, in *wit.Reader) ([]byte, error)

func channelOpen(_ *engine.HostCall, g *channelGuest, in *wit.Reader) ([]byte, error) {
	p, a, err := g.channels.openFully(in.String())
	if err != nil {
		return channelFailed(err), nil
	}
	return wit.AppendU32(wit.AppendCase(nil, resultOK), g.state.Put(&portResource{p, a})), nil
}

func channelSend(c *engine.HostCall, g *channelGuest, in *wit.Reader) ([]byte, error) {
	h, err := wasi.Get[*portResource](g.state, in.U32())
	if err != nil {
		return nil, err
	}
	message := in.Bytes()
	if len(message) > channel.DefaultMaxFrame {
		return failedWith(channelTooLong), nil
	}
	switch err := h.publish(c.Context(), message); {
	case err == nil:
		c.Renew()
		return wit.AppendCase(nil, resultOK), nil
	case c.Context().Err() != nil:
		return nil, err
	default:
		return channelFailed(err), nil
	}
}

func channelReceive(c *engine.HostCall, g *channelGuest, in *wit.Reader) ([]byte, error) {
	h, err := wasi.Get[*portResource](g.state, in.U32())
	if err != nil {
		return nil, err
	}
	var deadline time.Time
	if in.Option() {
		deadline = time.Now().Add(time.Duration(min(in.U64(), uint64(100*365*24*time.Hour))))
	}
	if !h.flags.CanRead() {
		return failedWith(channelNotPermitted), nil
	}
	message, err := h.next(c.Context(), deadline)
	switch {
	case err == nil:
		c.Renew()
		return wit.AppendBytes(wit.AppendOption(wit.AppendCase(nil, resultOK), true), message), nil
	case errors.Is(err, os.ErrDeadlineExceeded):
		return wit.AppendOption(wit.AppendCase(nil, resultOK), false), nil
	case c.Context().Err() != nil:
		return nil, err
	default:
		return channelFailed(err), nil
	}
}

func failedWith(which int) []byte {
	return wit.AppendCase(wit.AppendCase(nil, resultErr), which)
}

// channelFailed maps err to the interface's error enum and returns the encoded result.
func channelFailed(err error) []byte {
	which := channelIO
	switch {
	case errors.Is(err, io.EOF):
		which = channelClosed
	case errdefs.IsNotFound(err):
		which = channelNotFound
	case errdefs.IsPermissionDenied(err):
		which = channelNotPermitted
	case errdefs.IsResourceExhausted(err):
		which = channelTooMany
	}
	return failedWith(which)
}

// channelStream connects one of a component's standard streams to a channel.
type channelStream struct {
	portResource
	alive context.Context // pod.alive
	rest  []byte          // rest of the last message
}

// stdio connects a component's standard streams to the pod's channels called stdin, stdout and stderr. The pod need not
// have all three.
func (c *channels) stdio(alive context.Context, o *engine.InstanceOptions) error {
	for _, s := range []struct {
		name string
		put  func(s *channelStream)
	}{
		{"stdin", func(s *channelStream) { o.Stdin = s }},
		{"stdout", func(s *channelStream) { o.Stdout = s }},
		{"stderr", func(s *channelStream) { o.Stderr = s }},
	} {
		a := make(notifier, 1)
		p, err := c.open(s.name, s.name == "stdin", s.name != "stdin", a.wake)
		if errdefs.IsNotFound(err) {
			continue
		}
		if err != nil {
			return err
		}
		s.put(&channelStream{portResource: portResource{p, a}, alive: alive})
	}
	return nil
}

// Write publishes b as one message.
func (s *channelStream) Write(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	if err := s.publish(s.alive, b); err != nil {
		return 0, err
	}
	return len(b), nil
}

// Read returns the rest of a partly read message. If there is no rest, Read waits for the next message.
func (s *channelStream) Read(b []byte) (int, error) {
	for len(s.rest) == 0 {
		var err error
		if s.rest, err = s.next(s.alive, time.Time{}); err != nil {
			return 0, err
		}
	}
	n := copy(b, s.rest)
	s.rest = s.rest[n:]
	return n, nil
}
