package wasi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// Options configure what an instance may use.
type Options struct {
	Args           []string  // the first is the program's name
	Env            []string  // NAME=value
	Stdin          io.Reader // nil means empty
	Stdout, Stderr io.Writer // nil discards the output
	Preopens       []Preopen
	// Files and Bytes limit what several instances hold together. Files counts open files and directories. Bytes counts
	// the bytes that the host stores for resources. If one of them is nil, only the instance's own limit applies.
	Files, Bytes Quota
	// HTTP sends the guest's requests (package wasihttp). If it is nil, each request is denied.
	HTTP http.RoundTripper
	// Config is what wasi:config gives to the guest.
	Config Config
	// Log writes an entry of wasi:logging, which ends with a line break. If it is nil, entries are discarded.
	Log func(entry []byte)
	// Store keeps the pairs of wasi:keyvalue. If it is nil, there is no store to open.
	Store Store
	// Blobs keeps the objects of wasi:blobstore. If it is nil, there are no containers.
	Blobs *Blobs
	// Messages publishes what the guest sends by wasi:messaging. If it is nil, there is nothing to connect to.
	Messages Messages
	// Network opens the guest's connections. If it is nil, the guest can make no sockets and resolve no names.
	Network Network
	// Guard runs a background function of the host and returns its error. If the function panics, Guard recovers and
	// returns an error that names the place. If Guard is nil, a panic ends the process.
	Guard func(where string, f func() error) error
}

// Quota limits how much of something several instances hold. Take adds n, or returns false if the sum would exceed the
// limit. Give subtracts n.
type Quota interface {
	Take(n int64) bool
	Give(n int64)
}

// Preopen is a directory of the host that the guest can use.
type Preopen struct {
	Path     string // on the host (for example "/proc/self/fd/7")
	Guest    string // absolute, as the guest sees it
	ReadOnly bool
}

// State is the host's data for one instance: the guest's resources, and a channel that wakes the guest. Only the
// guest's thread may call the methods of a State, except Wake, Hold and Guard.
type State struct {
	options Options
	slots   []any
	free    []uint32
	wake    chan struct{}
	out     []byte
	open    int // files and directories
	stdin   *Reader
	alive   context.Context // ends with Close; nil until Alive is called
	end     context.CancelFunc

	holding sync.Mutex
	held    int // see Hold; guarded by holding
}

// maxHeld limits the host memory of all resources of an instance, in bytes. The window of each stream does not count.
const maxHeld = 16 << 20

// maxKept is the size, in bytes, of the largest result whose memory is kept for the next call.
const maxKept = 64 << 10

// ErrHeld ends the guest's call if the guest's resources would use more than maxHeld.
var ErrHeld = fmt.Errorf("the guest's resources hold more than %d bytes: %w", maxHeld, errdefs.ErrResourceExhausted)

// Hold adds n, which can be negative, to the number of bytes that the host stores for resources. If the sum would
// exceed a limit, Hold adds nothing and returns false. Any goroutine may call it until the State is closed.
func (s *State) Hold(n int) bool {
	s.holding.Lock()
	defer s.holding.Unlock()
	if n > 0 && n > maxHeld-s.held || !count(s.options.Bytes, n) {
		return false
	}
	s.held += n
	return true
}

// openMore adds n, which can be negative, to the number of open files and directories. If the sum would exceed a limit,
// openMore adds nothing and returns false.
func (s *State) openMore(n int) bool {
	if n > 0 && n > maxOpen-s.open || !count(s.options.Files, n) {
		return false
	}
	s.open += n
	return true
}

// count calls q.Take with n. If n is negative, it instead calls q.Give with -n. A nil q has no limit.
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

// NewState makes the State of an instance. It opens no files; preopened directories are opened when the guest asks for
// them.
func NewState(o Options) *State {
	return &State{options: o, wake: make(chan struct{}, 1)}
}

// Alive returns a context that ends when the State is closed.
func (s *State) Alive() context.Context {
	if s.alive == nil {
		s.alive, s.end = context.WithCancel(context.Background())
	}
	return s.alive
}

// Guard calls Options.Guard, or f if there is none.
func (s *State) Guard(where string, f func() error) error {
	if s.options.Guard == nil {
		return f()
	}
	return s.options.Guard(where, f)
}

// HTTP returns Options.HTTP.
func (s *State) HTTP() http.RoundTripper { return s.options.HTTP }

// Close releases what the guest has left open.
func (s *State) Close() {
	if s.end != nil {
		s.end()
	}
	for rep := range s.slots {
		s.Drop(uint32(rep))
	}
	s.Hold(-s.held) // what resources without a Close method hold
	s.slots, s.free = nil, nil
}

// Put adds a resource to the table and returns its number.
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

// Drop removes a resource from the table, and closes it if it is an io.Closer.
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

// Get returns a resource. The engine has already checked the handle. So if the resource is missing or has another type,
// Get returns errdefs.ErrInternal.
func Get[T any](s *State, rep uint32) (T, error) {
	var none T
	if int(rep) >= len(s.slots) {
		return none, fmt.Errorf("resource %d does not exist: %w", rep, errdefs.ErrInternal)
	}
	r, ok := s.slots[rep].(T)
	if !ok {
		return none, fmt.Errorf("resource %d is %T, not %T: %w", rep, s.slots[rep], none, errdefs.ErrInternal)
	}
	return r, nil
}

// Take is like Get, but also removes the resource from the table, because the guest gives it away.
func Take[T any](s *State, rep uint32) (T, error) {
	r, err := Get[T](s, rep)
	if err == nil {
		s.remove(rep)
	}
	return r, err
}

// Wake makes a waiting guest check its pollables again. Any goroutine may call it.
func (s *State) Wake() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// wait calls the function ready until ready reports true. After each call, it sleeps until State.Wake is called or, if
// the second result of ready is not zero, until that time at the latest. If ctx ends first, wait returns the cause of
// ctx.
func (s *State) wait(ctx context.Context, ready func() (bool, time.Time)) error {
	for {
		ok, again := ready()
		if ok {
			return nil
		}
		if err := s.sleep(ctx, again); err != nil {
			return err
		}
	}
}

// sleep returns when State.Wake is called. If the given time is not zero, sleep returns at that time at the latest.
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

// Call is one call of a host function.
type Call struct {
	context.Context
	*State
	// In reads the parameters in order. Slices that it returns are valid until the end of the call.
	In *wit.Reader
	// Out collects the flat result.
	Out []byte
	// Renew gives the guest's current call a fresh compute budget. Call Renew when the guest gets new work.
	Renew func()
}

// Func implements a host function. It reads the parameters from c.In and appends the result to c.Out. If it returns an
// error, the guest traps.
type Func func(c *Call) error

// Bound is a function of an interface with its implementation.
type Bound struct {
	Signature
	Interface string
	Do        Func
}

// Invoke calls the function with flat parameters. The result is valid until the next call of Invoke with the same
// State.
func (b *Bound) Invoke(ctx context.Context, s *State, args []byte, renew func()) ([]byte, error) {
	c := &Call{Context: ctx, State: s, In: wit.NewReader(args), Out: s.out[:0], Renew: renew}
	if err := b.Do(c); err != nil {
		return nil, fmt.Errorf("%s#%s: %w", b.Interface, b.Name, err)
	}
	if s.out = c.Out; cap(s.out) > maxKept {
		s.out = nil
	}
	return c.Out, c.In.Err()
}

// Bind joins the functions of an interface with their implementations, by name. Each function must have an
// implementation.
func Bind(i *Interface, do map[string]Func) ([]Bound, error) {
	var all []Bound
	var errs []error
	for _, f := range i.Funcs {
		if do[f.Name] == nil {
			errs = append(errs, fmt.Errorf("%s#%s has no implementation", i.Name, f.Name))
		}
		all = append(all, Bound{Signature: f, Interface: i.Name, Do: do[f.Name]})
	}
	if len(do) > len(all) {
		errs = append(errs, fmt.Errorf("%s has %d functions, but %d implementations", i.Name, len(all), len(do)))
	}
	return all, errors.Join(errs...)
}

// OK begins an ok result. The caller appends the value, if any.
func (c *Call) OK() { c.Out = wit.AppendCase(c.Out, 0) }

// Failed begins an error result. The caller appends the error's value, if any.
func (c *Call) Failed() { c.Out = wit.AppendCase(c.Out, 1) }

// FailedWith writes an error result whose value is case i, which has no payload.
func (c *Call) FailedWith(i int) {
	c.Failed()
	c.Out = wit.AppendCase(c.Out, i)
}

// Own adds a resource to the table and appends its handle.
func (c *Call) Own(resource any) { c.Out = wit.AppendU32(c.Out, c.Put(resource)) }
