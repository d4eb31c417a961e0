package wasi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// Options are what an instance is given of the world.
type Options struct {
	Stdin          io.Reader // nil: empty
	Stdout, Stderr io.Writer // nil: discarded
	Preopens       []Preopen
	// Files and Bytes are the share of what several instances hold together: open files and directories, and bytes that the
	// host keeps for resources. nil: this instance has bounds of its own only.
	Files, Bytes Quota
}

// Quota counts what several instances hold of a kind. Take counts nothing, and is false, when n more is too much.
type Quota interface {
	Take(n int64) bool
	Give(n int64)
}

// Preopen is a directory that the guest is given.
type Preopen struct {
	Path     string // on the host ("/proc/self/fd/7" is one)
	Guest    string // absolute, as the guest sees it
	ReadOnly bool
}

// State is what the host has of one instance: its resources and what it waits for. Its methods are for the thread of the
// guest, but for Wake.
type State struct {
	options Options
	slots   []any
	free    []uint32
	wake    chan struct{}
	out     []byte
	open    int // files and directories
	held    int // see Hold
	stdin   *Reader
}

// maxHeld is how much memory of the host, in bytes, the resources of an instance may hold together, besides a window for
// each of its streams.
const maxHeld = 16 << 20

// ErrHeld ends a guest that would hold more.
var ErrHeld = fmt.Errorf("the guest's resources hold more than %d bytes: %w", maxHeld, errdefs.ErrResourceExhausted)

// Hold counts n bytes more that a resource holds, or -n that it holds no more. It counts nothing, and is false, when
// that would be too much.
func (s *State) Hold(n int) bool {
	if n > 0 && n > maxHeld-s.held || !count(s.options.Bytes, n) {
		return false
	}
	s.held += n
	return true
}

// openMore counts n files and directories more that are open, or -n that are so no more. It counts nothing, and is false, when
// that would be too many.
func (s *State) openMore(n int) bool {
	if n > 0 && n > maxOpen-s.open || !count(s.options.Files, n) {
		return false
	}
	s.open += n
	return true
}

// count takes from a quota, or gives back.
func count(q Quota, n int) bool {
	switch {
	case q == nil:
		return true
	case n > 0:
		return q.Take(int64(n))
	}
	q.Give(int64(-n))
	return true
}

// NewState makes the State of an instance. Nothing is opened before the guest asks for it.
func NewState(o Options) *State {
	return &State{options: o, wake: make(chan struct{}, 1)}
}

// Close releases what the guest has left open.
func (s *State) Close() {
	for rep := range s.slots {
		s.Drop(uint32(rep))
	}
	s.Hold(-s.held) // of resources that are no Closers
	s.slots, s.free = nil, nil
}

// Put enters a resource into the table and returns its number.
func (s *State) Put(resource any) uint32 {
	if n := len(s.free); n > 0 {
		rep := s.free[n-1]
		s.free = s.free[:n-1]
		s.slots[rep] = resource
		return rep
	}
	s.slots = append(s.slots, resource)
	return uint32(len(s.slots) - 1)
}

// Drop takes a resource out of the table and, when it is an io.Closer, closes it.
func (s *State) Drop(rep uint32) {
	if int(rep) >= len(s.slots) || s.slots[rep] == nil {
		return
	}
	if c, ok := s.slots[rep].(io.Closer); ok {
		_ = c.Close()
	}
	s.remove(rep)
}

func (s *State) remove(rep uint32) {
	s.slots[rep] = nil
	s.free = append(s.free, rep)
}

// Get finds a resource. That it is another, or gone, is a mistake of the host, for the engine knows the types of handles.
func Get[T any](s *State, rep uint32) (T, error) {
	var none T
	if int(rep) >= len(s.slots) {
		return none, fmt.Errorf("resource %d is not there: %w", rep, errdefs.ErrInternal)
	}
	r, ok := s.slots[rep].(T)
	if !ok {
		return none, fmt.Errorf("resource %d is %T, not %T: %w", rep, s.slots[rep], none, errdefs.ErrInternal)
	}
	return r, nil
}

// Take is Get for a resource that its owner gives away: it leaves the table.
func Take[T any](s *State, rep uint32) (T, error) {
	r, err := Get[T](s, rep)
	if err == nil {
		s.remove(rep)
	}
	return r, err
}

// Wake makes a guest that waits look again. Anyone may call it.
func (s *State) Wake() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// wait returns when ready is true. It looks when woken, and at the time that ready returns when it is false (the zero
// time: only when woken). The error is that of ctx.
func (s *State) wait(ctx context.Context, ready func() (bool, time.Time)) error {
	for {
		is, again := ready()
		if is {
			return nil
		}
		if err := s.sleep(ctx, again); err != nil {
			return err
		}
	}
}

// sleep returns when woken, or at the time until, unless that is zero.
func (s *State) sleep(ctx context.Context, until time.Time) error {
	var timeout <-chan time.Time
	if !until.IsZero() {
		timer := time.NewTimer(time.Until(until))
		defer timer.Stop()
		timeout = timer.C
	}
	select {
	case <-s.wake:
	case <-timeout:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}

// Call is one call of a host function: its parameters and where its result goes.
type Call struct {
	context.Context
	*State
	// In reads the parameters, in their order; what it hands out is valid until the end of the call.
	In *wit.Reader
	// Out takes the result.
	Out []byte
	// Renew gives the guest's own call a fresh budget: for calls that bring it new work.
	Renew func()
}

// Func does what a host function does: it reads c.In and appends the result to c.Out. An error traps the guest.
type Func func(c *Call) error

// Bound is a function that guests are offered.
type Bound struct {
	Signature
	Interface string
	Do        Func
}

// Invoke calls the function with flat parameters. The result is valid until the next call of a function with s.
func (b *Bound) Invoke(ctx context.Context, s *State, args []byte, renew func()) ([]byte, error) {
	c := &Call{Context: ctx, State: s, In: wit.NewReader(args), Out: s.out[:0], Renew: renew}
	if err := b.Do(c); err != nil {
		return nil, fmt.Errorf("%s#%s: %w", b.Interface, b.Name, err)
	}
	s.out = c.Out
	return c.Out, c.In.Err()
}

// Bind joins the functions of an interface with what they do, by the component model's names. Each must have its Func.
func Bind(i *Interface, do map[string]Func) ([]Bound, error) {
	var all []Bound
	var errs []error
	for _, f := range i.Funcs {
		if do[f.Name] == nil {
			errs = append(errs, fmt.Errorf("%s#%s does nothing", i.Name, f.Name))
		}
		all = append(all, Bound{Signature: f, Interface: i.Name, Do: do[f.Name]})
	}
	if len(do) > len(all) {
		errs = append(errs, fmt.Errorf("%s has %d functions, not %d", i.Name, len(all), len(do)))
	}
	return all, errors.Join(errs...)
}

// Results, as functions write them.

// OK begins a result that is good; the value follows, if it has one.
func (c *Call) OK() { c.Out = wit.AppendCase(c.Out, 0) }

// Failed begins a result that is an error; its value follows, if it has one.
func (c *Call) Failed() { c.Out = wit.AppendCase(c.Out, 1) }

// FailedWith is a result whose error is a case without payload.
func (c *Call) FailedWith(i int) {
	c.Failed()
	c.Out = wit.AppendCase(c.Out, i)
}

// Own enters a resource into the table and appends its handle.
func (c *Call) Own(resource any) { c.Out = wit.AppendU32(c.Out, c.Put(resource)) }
