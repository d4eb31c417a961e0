package worker

import (
	"context"
	_ "embed" // channels.wit
	"errors"
	"fmt"
	"io"
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

// channelsInterface begins the name of what components are offered in the place of /ch, in its compatible versions.
const channelsInterface = "tripod:edge/channels@0.1."

// Cases of its enum error.
const (
	channelNotFound = iota
	channelNotPermitted
	channelTooMany
	channelTooLong
	channelClosed
	channelIO
)

// channelGuest is what the host has of a component; it is the instance's Host.
type channelGuest struct {
	state    *wasi.State
	channels *channels // nil: the pod has none
}

// WASI implements wasihttp.Guest.
func (g *channelGuest) WASI() *wasi.State { return g.state }

// heldPort is a channel that a component has open, as a resource.
type heldPort struct {
	*port
	awaker
}

// Close is called when the guest drops the resource, or is gone.
func (h *heldPort) Close() error {
	h.port.Close()
	return nil
}

// awaker is what waits in Go for a port.
type awaker chan struct{}

func (a awaker) wake() {
	select {
	case a <- struct{}{}:
	default:
	}
}

// wait returns when the port has called wake, or it is time; the error is that of ctx. Room may also come by the passing of
// time.
func (a awaker) wait(ctx context.Context, until time.Time) error {
	const again = 200 * time.Millisecond
	d := again
	if !until.IsZero() {
		d = min(d, time.Until(until))
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-a:
	case <-timer.C:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}

// openWhole opens a channel of a name for all that it was given for.
func (c *channels) openWhole(name string) (*port, awaker, error) {
	if c == nil {
		return nil, nil, fmt.Errorf("channel %q: the module has no channels: %w", name, errdefs.ErrNotFound)
	}
	flags, a := c.named[name].Flags, make(awaker, 1)
	p, err := c.open(name, flags.CanRead(), flags.CanWrite(), a.wake)
	return p, a, err
}

// channelHost is the Host of commands: WASI, and channels.
var channelHost = sync.OnceValue(func() engine.Host {
	interfaces, err := wasi.ParseWIT(channelsText)
	if err != nil {
		panic(err) // embedded in the program; the tests read it
	}
	i := interfaces[0]
	h := wasihttp.WASI()
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

// channelFunc is a function of the interface. An error ends the guest.
type channelFunc func(c *engine.HostCall, g *channelGuest, in *wit.Reader) ([]byte, error)

func channelOpen(_ *engine.HostCall, g *channelGuest, in *wit.Reader) ([]byte, error) {
	p, a, err := g.channels.openWhole(in.String())
	if err != nil {
		return channelFailed(err), nil
	}
	return wit.AppendU32(wit.AppendCase(nil, resultOK), g.state.Put(&heldPort{p, a})), nil
}

func channelSend(c *engine.HostCall, g *channelGuest, in *wit.Reader) ([]byte, error) {
	h, err := wasi.Get[*heldPort](g.state, in.U32())
	if err != nil {
		return nil, err
	}
	message := in.Bytes()
	if len(message) > channel.DefaultMaxFrame {
		return failedWith(channelTooLong), nil
	}
	for {
		err := h.Send(message)
		if err == nil {
			c.Renew()
			return wit.AppendCase(nil, resultOK), nil
		}
		if !errors.Is(err, engine.ErrWait) {
			return channelFailed(err), nil
		}
		if err := h.wait(c.Context(), time.Time{}); err != nil {
			return nil, err
		}
	}
}

func channelReceive(c *engine.HostCall, g *channelGuest, in *wit.Reader) ([]byte, error) {
	h, err := wasi.Get[*heldPort](g.state, in.U32())
	if err != nil {
		return nil, err
	}
	var until time.Time
	if in.Option() {
		until = time.Now().Add(time.Duration(min(in.U64(), uint64(100*365*24*time.Hour))))
	}
	if !h.flags.CanRead() {
		return failedWith(channelNotPermitted), nil
	}
	for {
		message, err := h.Receive()
		if err == nil {
			c.Renew()
			return wit.AppendBytes(wit.AppendOption(wit.AppendCase(nil, resultOK), true), message), nil
		}
		if !errors.Is(err, engine.ErrWait) {
			return channelFailed(err), nil
		}
		if !until.IsZero() && !time.Now().Before(until) {
			return wit.AppendOption(wit.AppendCase(nil, resultOK), false), nil
		}
		if err := h.wait(c.Context(), until); err != nil {
			return nil, err
		}
	}
}

func failedWith(which int) []byte {
	return wit.AppendCase(wit.AppendCase(nil, resultErr), which)
}

// channelFailed is a result that is an error.
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

// channelStream is a standard stream of a component that is on a channel.
type channelStream struct {
	heldPort
	alive context.Context // the pod's
	rest  []byte
}

// stdio puts the standard streams of a component on channels of their names, if there are such.
func (c *channels) stdio(alive context.Context, o *engine.InstanceOptions) error {
	for _, s := range []struct {
		name string
		put  func(s *channelStream)
	}{
		{"stdin", func(s *channelStream) { o.Stdin = s }},
		{"stdout", func(s *channelStream) { o.Stdout = s }},
		{"stderr", func(s *channelStream) { o.Stderr = s }},
	} {
		a := make(awaker, 1)
		p, err := c.open(s.name, s.name == "stdin", s.name != "stdin", a.wake)
		if errdefs.IsNotFound(err) {
			continue
		}
		if err != nil {
			return err
		}
		s.put(&channelStream{heldPort: heldPort{p, a}, alive: alive})
	}
	return nil
}

// Write publishes what the guest has written in one piece.
func (s *channelStream) Write(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	for {
		err := s.Send(b)
		if err == nil {
			return len(b), nil
		}
		if errors.Is(err, engine.ErrWait) {
			err = s.wait(s.alive, time.Time{})
		}
		if err != nil {
			return 0, err
		}
	}
}

// Read gives a message, or what is left of the last one.
func (s *channelStream) Read(b []byte) (int, error) {
	for len(s.rest) == 0 {
		var err error
		if s.rest, err = s.Receive(); errors.Is(err, engine.ErrWait) {
			err = s.wait(s.alive, time.Time{})
		}
		if err != nil {
			return 0, err
		}
	}
	n := copy(b, s.rest)
	s.rest = s.rest[n:]
	return n, nil
}
