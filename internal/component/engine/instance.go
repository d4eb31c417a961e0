package engine

// #include "tw.h"
// #include <stdlib.h>
import "C"

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/cgo"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"
	"unsafe"

	"github.com/containerd/errdefs"
)

// Defaults of InstanceOptions.
const (
	defaultMaxHandles = 10000
	defaultMaxValue   = 64 << 20
)

// abandonAfter is how long Call waits for a killed guest to end; after that time, the guest is abandoned. An abandoned
// guest sleeps or waits in WASI, where no tick reaches it. Its thread and memory are released when it wakes up.
const abandonAfter = 100 * time.Millisecond

// Instance is a running guest with its own memory. Only one goroutine at a time may call the guest; Kill, CPU and
// Memory are safe for concurrent use.
type Instance struct {
	code     *Code
	link     *link
	opts     InstanceOptions
	canWait  bool        // the guest can wait where no tick reaches it
	limit    uint64      // maximum size of the guest's memory, in bytes
	overflow bool        // the instance is outside the pool
	hosting  atomic.Bool // the guest is in a host function
	handle   cgo.Handle
	channels []*descriptor // indexed by the C half's number, nil if free; used only on the guest's thread
	// The pipe for standard input: our end and the guest's.
	stdin, stdinEnd *os.File

	mu        sync.Mutex
	c         *C.tw_inst // nil once released
	seq       uint64
	busy      bool
	returned  bool  // the guest has returned from the current call
	abandoned bool  // nobody waits for the guest any longer; it is released when its call returns
	closed    bool  // Close has been called
	dead      error // why the instance can no longer be called
	idle      sync.Cond
	cpu       time.Duration // set on release
	killed    chan struct{} // closed by Kill

	// State of the current call; cancel is guarded by mu.
	ctx     context.Context
	derived context.Context
	cancel  context.CancelFunc
	hostErr error
	onSent  func([]byte) // of the Exchange; used by the guest's thread only
	late    bool         // await killed the call, because its budget was used up
	runFunc *C.tw_func   // what Run calls; nil for _start
	running bool         // the call is a Run, which has no budget
}

// Instantiate makes an instance and runs the guest's own initialization, within opts.Deadline and ctx. It returns the
// same errors as Instance.Call, and errdefs.ErrResourceExhausted if there is no room for another instance.
func (c *Code) Instantiate(ctx context.Context, opts InstanceOptions) (*Instance, error) {
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	strs, err := opts.pack()
	if err != nil {
		return nil, err
	}
	path := opts.Path
	if path == PathAuto {
		path = c.path
	}
	pooled := c.pooled(path)
	i, err := c.instantiate(ctx, path, pooled, opts, strs)
	if errors.Is(err, errNoRoom) && pooled {
		i, err = c.instantiate(ctx, path, false, opts, strs)
	}
	return i, err
}

// errNoRoom means that the pool, or the space outside it, is full.
var errNoRoom = fmt.Errorf("no room for one more instance: %w", errdefs.ErrResourceExhausted)

func (c *Code) instantiate(ctx context.Context, path Path, pooled bool, opts InstanceOptions, strs []byte) (*Instance, error) {
	i := &Instance{code: c, opts: opts, killed: make(chan struct{})}
	i.idle.L = &i.mu
	var err error
	if i.limit, err = i.memoryLimit(); err != nil {
		return nil, err
	}
	l, err := c.acquire(path, pooled)
	if err != nil {
		return nil, err
	}
	i.link = l
	if !l.pooled() {
		room := c.engine.cfg.Overflow
		if pooled || path == PathCore && c.img.Snapshot.Detached { // it leaves its place in the pool to others
			room += c.engine.cfg.Instances
		}
		if n := c.engine.overflow.Add(1); n > int64(room) {
			c.engine.overflow.Add(-1)
			l.drop()
			return nil, fmt.Errorf("%w (%d in the pool, %d outside it)", errNoRoom, c.engine.cfg.Instances, n-1)
		}
		i.overflow = true
	}
	i.canWait = path == PathCore && c.img.CoreWaits && len(opts.Preopens) > 0 || path == PathComponent && bool(l.c.wasi)
	i.handle = cgo.NewHandle(i)
	opts.Account.addInstances(1)
	if err := i.make(strs); err != nil {
		i.Close()
		return nil, err
	}
	err = i.enter(ctx, func(c *C.tw_inst, seq C.uint64_t) C.int {
		from := opts.Snapshot.begin(l) // on the guest's thread, which can be abandoned
		defer opts.Snapshot.end(from)
		return C.tw_start(c, &l.c, from, seq)
	}, func(*C.tw_inst) error { return nil })
	if errors.Is(err, errNoRoom) {
		i.closeChannels() // because Instantiate can try again
	}
	if err != nil {
		i.Close()
		return nil, err
	}
	return i, nil
}

// memoryLimit returns the lowest of all memory limits, or ErrMemory if the guest declares more memory than that.
func (i *Instance) memoryLimit() (uint64, error) {
	limit := i.code.engine.cfg.MaxMemory
	if i.opts.MaxMemory > 0 {
		limit = min(limit, i.opts.MaxMemory)
	}
	if a := i.opts.Account; a != nil && a.limit() > 0 {
		limit = min(limit, a.limit()-min(a.limit(), i.code.img.charged()))
	}
	if need := max(i.code.img.MinMemory, i.opts.Snapshot.memory()); need > limit {
		return 0, fmt.Errorf("%w: it declares %s, its limit is %s", ErrMemory, inBytes(need), inBytes(limit))
	}
	return limit, nil
}

// make allocates the C half of the instance, with the guest's environment.
func (i *Instance) make(strs []byte) error {
	o := i.copts()
	if i.opts.Stdin != nil && bool(i.link.c.wasi) {
		r, w, err := os.Pipe()
		if err != nil {
			return fmt.Errorf("standard input: %w", err)
		}
		i.stdin, i.stdinEnd = w, r
		go feed(w, i.opts.Stdin)
		o.stdin_fd = C.int(r.Fd())
	}
	if err := i.addFiles(&o); err != nil {
		return err
	}
	i.mu.Lock() // because the open channels can already call wake
	defer i.mu.Unlock()
	i.c = C.tw_new(&i.link.c, &o, (*C.char)(unsafe.Pointer(unsafe.SliceData(strs))), C.size_t(len(strs)))
	switch {
	case i.c == nil:
		return ErrStarved
	case i.c.why == C.TW_STARVED:
		return fmt.Errorf("%w: %s", ErrStarved, C.GoString(i.c.message))
	case i.c.why == C.TW_HANDLES:
		return fmt.Errorf("%w: %s", ErrHandles, C.GoString(i.c.message))
	case i.c.why != C.TW_OK:
		return invalid("the guest's environment: %s", C.GoString(i.c.message))
	}
	return nil
}

func (i *Instance) copts() C.tw_opts {
	o := C.tw_opts{
		go_: C.uintptr_t(i.handle), budget: C.int64_t(i.opts.Deadline),
		max_memory: C.uint64_t(i.limit), max_table: C.uint64_t(i.code.engine.cfg.MaxTableElements),
		max_calls: C.uint64_t(i.opts.MaxHostCalls), max_value: defaultMaxValue, max_handles: defaultMaxHandles,
		min_memory: C.uint64_t(i.code.img.MinMemory), own: C.int64_t(i.code.img.charged()), memories: C.uint32_t(i.code.img.Memories),
		nargs: C.uint32_t(len(i.opts.Args)), nenv: C.uint32_t(len(i.opts.Env)), capture: C.bool(i.opts.Capture),
		npreopens: C.uint32_t(len(i.opts.Preopens)), stdin_fd: -1,
	}
	if i.opts.Account != nil {
		o.account = i.opts.Account.c
	}
	if i.opts.MaxTableElements > 0 {
		o.max_table = min(o.max_table, C.uint64_t(i.opts.MaxTableElements))
	}
	if i.opts.MaxHandles > 0 {
		o.max_handles = C.uint32_t(i.opts.MaxHandles)
	}
	if i.opts.MaxValue > 0 {
		o.max_value = C.uint64_t(i.opts.MaxValue)
	}
	for n, p := range i.opts.Preopens {
		if p.ReadOnly {
			o.read_only |= 1 << n
		}
	}
	return o
}

// feed copies r to the guest until r ends or the guest closes the pipe.
func feed(w *os.File, r io.Reader) {
	_, _ = io.Copy(w, r)
	_ = w.Close()
}

// pack encodes the strings for the C half (see tw_new).
func (o *InstanceOptions) pack() ([]byte, error) {
	var b []byte
	add := func(s string) { b = append(append(b, s...), 0) }
	for _, a := range o.Args {
		add(a)
	}
	for _, e := range o.Env {
		if !strings.Contains(e, "=") {
			e += "="
		}
		add(e)
	}
	for _, p := range o.Preopens {
		add(p.Path)
		add(p.Guest)
	}
	if n := bytes.Count(b, []byte{0}); n != len(o.Args)+len(o.Env)+2*len(o.Preopens) || !utf8.Valid(b) {
		return nil, invalid("arguments, environment and paths must be UTF-8 without NUL")
	}
	if len(o.Preopens) > 64 {
		return nil, invalid("%d directories for the guest; at most 64 are possible", len(o.Preopens))
	}
	return append(b, 0), nil
}
