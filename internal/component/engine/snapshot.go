package engine

// #include "tw.h"
// #include <stdlib.h>
import "C"

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"sync"
	"unsafe"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/component/wit"
)

// The interfaces that a guest exports if it can continue from a snapshot, and if it can do in advance what its first
// request would do (sdk/wit). One of them is enough for a snapshot.
const (
	snapshotInterface = "tripod:grpc/snapshot@0.1.0"
	warmInterface     = "tripod:grpc/warm@0.1.0"
)

// snapshotInspection says whether instances of the guest can begin from a snapshot.
type snapshotInspection struct {
	// Reason is why they cannot, or "".
	Reason string
	// Detached says that the guest's module with the memory has no data, which the code image has in a module of its own. It
	// can be so without snapshots: then instances begin with the memory as the guest's maker has built it (Code.Initial).
	Detached bool
	Globals  int // number of mutable globals
	Tables   int
}

// detach separates a module from its memory and compiles the memory. It returns the other part, or m if that is impossible,
// or of no use.
func (e *Engine) detach(m wasmbin.Module, img *image) (wasmbin.Module, error) {
	if img.World == WorldCommand { // it runs once
		return m, nil
	}
	d, reason, err := wasmbin.Detach(m.Code)
	if d == nil {
		img.Snapshot.Reason = cmp.Or(img.Snapshot.Reason, reason)
		return m, err
	}
	img.Snapshot.Detached, img.Snapshot.Globals, img.Snapshot.Tables = true, d.Globals, d.Tables
	if m.Code = d.Code; !m.Counted {
		m.Segments = 0 // the host fills the memory
	}
	img.memory, err = compiled(e.plain, d.Memory)
	return m, err
}

// linkDetached loads the initial memory of a detached module.
func (c *Code) linkDetached(l *link) error {
	var err error
	if l.memory, err = deserialized(c.engine.plain, c.img.memory); err != nil {
		return err
	}
	l.frees = append(l.frees, func() {
		if l.memory != nil {
			C.wasmtime_module_delete(l.memory)
		}
	})
	d, err := callocOne[C.tw_detached]()
	if err != nil {
		return err
	}
	l.frees = append(l.frees, func() { C.free(unsafe.Pointer(d)) })
	*d = C.tw_detached{nglobals: C.uint32_t(c.img.Snapshot.Globals), ntables: C.uint32_t(c.img.Snapshot.Tables)}
	l.c.detached = d
	return nil
}

// PrepareSignature is the function that a guest with snapshots exports. Call it before Instance.Capture. Its result is the
// number of random values and readings of the time of day that other instances can share, or why the guest cannot have a
// snapshot.
func PrepareSignature() Signature { return Signature{snapshotInterface, "prepare", nil, readings} }

// WarmSignature is the function that a guest exports in addition, or instead. Call it after PrepareSignature and before
// Instance.Capture. Its result has the same meaning.
func WarmSignature() Signature { return Signature{warmInterface, "warm", nil, readings} }

// readings is result<u32, string>.
var readings = &wit.Type{Kind: wit.Result, Ok: &wit.Type{Kind: wit.U32}, Err: &wit.Type{Kind: wit.String}}

// WhyNoSnapshot returns why instances of the guest cannot begin from a snapshot, or "" if they can.
func (c *Code) WhyNoSnapshot() string { return c.img.whyNoSnapshot() }

func (i *inspection) whyNoSnapshot() string {
	if i.Snapshot.Detached {
		return i.Snapshot.Reason
	}
	return cmp.Or(i.Snapshot.Reason, "the guest is not called on its linear memory")
}

// Snapshot is the state of an instance of a guest, from which other instances begin: its memory, which they share until
// they write to it, and its global variables. It is safe for concurrent use.
type Snapshot struct {
	link *link
	size uint64 // of the memory, in bytes
	data uint64

	mu      sync.Mutex
	users   int // instances that begin from it
	closed  bool
	c       *C.tw_snapshot // until it is closed and has no users
	mem     *C.tw_image
	account *Account // keeps alive what mem refers to
}

// Limits on snapshots.
const (
	// pageBytes is the granularity in which zeros are left out.
	pageBytes = 4096
	// maxSparse is the largest memory image, in bytes, if more than half of it are zeros. They take memory once a guest has
	// read them.
	maxSparse = 16 << 20
)

// Capture makes a snapshot of an instance that was made with InstanceOptions.Capture and that has run nothing but its
// initialization, PrepareSignature and WarmSignature, of which the last one has returned renewed. The snapshot's memory, of at
// most most bytes, belongs to the caller.
//
// The error is errdefs.ErrFailedPrecondition, and says why, if the guest's state is more than its memory: it holds
// resources, open files, or other functions in its tables. Unless trusted is set, this is also the error if the guest has
// seen what other instances must see for themselves: more random values and readings of the time of day than renewed, or
// files.
func (i *Instance) Capture(renewed uint32, trusted bool, most uint64) (*Snapshot, error) {
	if _, err := i.begin(context.Background()); err != nil {
		return nil, err
	}
	defer i.end()
	globals := (*C.wasmtime_val_t)(C.tw_zeroed(C.size_t(i.code.img.Snapshot.Globals+1) * C.sizeof_wasmtime_val_t))
	if globals == nil {
		return nil, ErrStarved
	}
	s := &Snapshot{link: i.link}
	defer func() {
		if s.c == nil {
			C.free(unsafe.Pointer(globals))
		}
	}()
	if err := i.capturable(renewed, trusted, globals); err != nil {
		return nil, err
	}
	detached := i.link.c.detached
	memory := memoryBytes(i.c.cx, &i.c.guest.memory)
	data, size := nonZero(memory)
	span := spanOf(data)
	if size > most || span > maxSparse && size < span/2 {
		return nil, unsuitable("its initialized memory has %s of data within %s, limit %s", inBytes(size), inBytes(span), inBytes(most))
	}
	s.size, s.data = uint64(len(memory)), span
	var err error
	if s.mem, err = newMemoryImage(len(memory), data); err != nil {
		return nil, err
	}
	if s.c, err = callocOne[C.tw_snapshot](); err != nil {
		C.tw_image_close(s.mem)
		return nil, err
	}
	s.keep(detached.initial.min, i.opts.Account)
	*s.c = C.tw_snapshot{memory: s.mem, globals: globals, nglobals: detached.nglobals}
	return s, nil
}

// keep makes the snapshot keep the memories of instances that have ended for the next ones, at the expense of an account.
func (s *Snapshot) keep(min C.size_t, account *Account) {
	s.mem.keep, s.mem.min = true, min
	if s.account = account; account != nil {
		s.mem.account = account.c
	}
}

// Initial returns the state in which instances of the guest begin without a snapshot, as a snapshot that takes no memory of
// its own. What it saves is the mapping of memory and the page faults of each instance. It returns nil if the guest's
// memory is not detached.
func (c *Code) Initial(account *Account) (*Snapshot, error) {
	if c.path != PathCore || !c.img.Snapshot.Detached {
		return nil, nil
	}
	l, err := c.acquire(PathCore, false)
	if err != nil {
		return nil, err
	}
	defer l.drop()
	own := l.c.detached.initial
	s := &Snapshot{link: l, size: uint64(own.size)}
	fd, err := unix.FcntlInt(uintptr(own.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("memory image: %w: %w", err, errdefs.ErrResourceExhausted)
	}
	if s.mem = C.tw_image_new(C.int(fd), own.begin, own.end, own.size); s.mem == nil {
		_ = unix.Close(fd)
		return nil, ErrStarved
	}
	if s.c, err = callocOne[C.tw_snapshot](); err != nil {
		C.tw_image_close(s.mem)
		return nil, err
	}
	s.keep(own.min, account)
	*s.c = C.tw_snapshot{memory: s.mem, initial: true}
	return s, nil
}

// MayCapture returns the error of Capture as far as it comes from what the guest has done so far.
func (i *Instance) MayCapture(renewed uint32, trusted bool) error {
	if _, err := i.begin(context.Background()); err != nil {
		return err
	}
	defer i.end()
	return i.capturable(renewed, trusted, nil)
}

// capturable checks what the guest has done, and copies its globals unless the last parameter is nil.
func (i *Instance) capturable(renewed uint32, trusted bool, globals *C.wasmtime_val_t) error {
	if why := i.code.WhyNoSnapshot(); why != "" || i.link.c.detached == nil {
		return unsuitable("%s", cmp.Or(why, "it took another path"))
	}
	if why := C.tw_capture(i.c, i.link.c.detached, globals); why != nil {
		return unsuitable("%s", C.GoString(why))
	}
	used := i.c.capture.used
	switch {
	case used&C.TW_USED_HOST != 0:
		return unsuitable("it calls the host before its first request")
	case trusted:
		return nil
	case uint64(i.c.capture.randoms)+uint64(i.c.capture.clocks) > uint64(renewed):
		return unsuitable("it asks for random values or the time of day before its first request, and all requests would share them")
	case used&C.TW_USED_FILES != 0:
		return unsuitable("it reads files before its first request")
	}
	return nil
}

func unsuitable(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, errdefs.ErrFailedPrecondition)...)
}

// nonZero returns the pages of a memory that are not zero, joined where they are adjacent, and their size in bytes.
func nonZero(memory []byte) (data []wasmbin.Data, size uint64) {
	zero := make([]byte, pageBytes)
	for at := 0; at < len(memory); at += pageBytes {
		page := memory[at : at+pageBytes]
		if bytes.Equal(page, zero) {
			continue
		}
		size += pageBytes
		if n := len(data) - 1; n >= 0 && int(data[n].Offset)+len(data[n].Bytes) == at {
			data[n].Bytes = memory[data[n].Offset : at+pageBytes]
			continue
		}
		data = append(data, wasmbin.Data{Offset: uint32(at), Bytes: page})
	}
	return data, size
}

// spanOf returns the distance in bytes from the first to the last byte of data.
func spanOf(data []wasmbin.Data) uint64 {
	if len(data) == 0 {
		return 0
	}
	last := data[len(data)-1]
	return uint64(last.Offset) + uint64(len(last.Bytes)) - uint64(data[0].Offset)
}

// begin returns the C half of the snapshot for an instance of a link, until end is called on it. It returns nil if the
// snapshot is closed, or belongs to another guest or engine. It is a memory, so it does not matter which machine code has made it.
func (s *Snapshot) begin(l *link) *C.tw_snapshot {
	if s == nil || s.link.code != l.code || s.link.slot != l.slot {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.users++
	return s.c
}

// end gives back what begin has returned, if it is not nil.
func (s *Snapshot) end(c *C.tw_snapshot) {
	if c == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.users--; s.closed && s.users == 0 {
		C.tw_image_done(s.mem)
		s.free()
	}
}

// free frees the C half. The caller holds s.mu.
func (s *Snapshot) free() {
	C.free(unsafe.Pointer(s.c.globals))
	C.free(unsafe.Pointer(s.c))
	s.c, s.mem = nil, nil
}

// memory returns the size of the memory with which instances begin, in bytes.
func (s *Snapshot) memory() uint64 {
	if s == nil {
		return 0
	}
	return s.size
}

// Size returns the memory that the snapshot itself uses, in bytes.
func (s *Snapshot) Size() uint64 { return s.data }

// Close releases the snapshot. Instances that have begun from it are not affected.
func (s *Snapshot) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	s.closed = true
	if s.users > 0 {
		C.tw_image_use(s.mem) // for end
	}
	C.tw_image_close(s.mem)
	if s.users == 0 {
		s.free()
	}
}
