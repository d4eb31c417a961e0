package engine

// #include "tw.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime/cgo"
	"runtime/debug"
	"unsafe"
)

// HostCall is a call of a host function. It is valid until the function returns.
type HostCall struct {
	inst *Instance
	c    *C.tw_inst
}

// Context returns the context of the current Call or Run. The context also ends when the instance is killed.
func (c *HostCall) Context() context.Context { return c.inst.callContext() }

// Host returns InstanceOptions.Host.
func (c *HostCall) Host() any { return c.inst.opts.Host }

// Renew gives the current Call or Run a fresh compute budget and a fresh quota of host calls. Use it when the host
// function hands the guest new work, such as the next message of a stream.
func (c *HostCall) Renew() { c.c.call.renew = true }

// twHost runs on the guest's thread, within a Call, Run or Instantiate of this instance.
//
//export twHost
func twHost(handle C.uintptr_t, fn C.uint32_t, args *C.uint8_t, n C.size_t, ci *C.tw_inst) C.int {
	i := cgo.Handle(handle).Value().(*Instance)
	i.hosting.Store(true)
	defer i.hosting.Store(false)
	i.passOn(ci)
	f := &i.code.host.funcs[fn]
	out, err := callHost(f, &HostCall{inst: i, c: ci}, unsafe.Slice((*byte)(args), int(n)))
	if exit := (*Exit)(nil); errors.As(err, &exit) {
		ci.exit_code = C.int(exit.Code)
		return C.TW_EXIT
	}
	if err != nil {
		i.hostErr = fmt.Errorf("host function %s#%s: %w", f.Interface, f.Name, err)
		return C.TW_HOST
	}
	if len(out) == 0 {
		return C.TW_OK
	}
	room := C.tw_room(&ci.scratch, C.size_t(len(out)))
	if room == nil {
		i.hostErr = fmt.Errorf("host function %s#%s: its result of %d bytes: %w", f.Interface, f.Name, len(out), ErrStarved)
		return C.TW_HOST
	}
	copy(unsafe.Slice((*byte)(room), len(out)), out)
	return C.TW_OK
}

// callHost calls f and turns a panic into an error, because a panic would unwind guest frames and end the process.
func callHost(f *HostFunc, c *HostCall, args []byte) (out []byte, err error) {
	defer func() {
		if p := recover(); p != nil {
			c.inst.code.engine.cfg.Logger.Error("host function panicked",
				"function", f.Interface+"#"+f.Name, "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return f.Call(c, args)
}

//export twDrop
func twDrop(handle C.uintptr_t, resource, rep C.uint32_t) {
	i := cgo.Handle(handle).Value().(*Instance)
	if drop := i.code.host.drops[resource]; drop != nil {
		i.hosting.Store(true)
		defer i.hosting.Store(false)
		defer i.recoverPanic("drop of a resource")
		drop(i.opts.Host, uint32(rep))
	}
}

// recoverPanic recovers and logs a panic in a host callback that cannot return an error. Defer it.
func (i *Instance) recoverPanic(what string) {
	if p := recover(); p != nil {
		i.code.engine.cfg.Logger.Error(what+" panicked", "panic", p, "stack", string(debug.Stack()))
	}
}

//export twWrite
func twWrite(handle C.uintptr_t, fd C.int, p *C.uchar, n C.size_t) C.ptrdiff_t {
	return C.ptrdiff_t(write(cgo.Handle(handle), int(fd), unsafe.Slice((*byte)(p), int(n))))
}

// write writes a guest's output, or discards it if the instance is released. It returns the number of bytes, or -errno.
func write(handle cgo.Handle, fd int, p []byte) (n int) {
	const eio = 5
	i := owner(handle)
	if i == nil {
		return len(p)
	}
	var w io.Writer = i.opts.Stdout
	if fd == 2 {
		w = i.opts.Stderr
	}
	if w == nil {
		return len(p)
	}
	n = -eio
	defer i.recoverPanic("writer of a guest's output")
	k, err := w.Write(p)
	if err != nil && k == 0 {
		return -eio
	}
	return k
}

// owner returns the instance of a handle, or nil if the instance is released. A handle can belong to a released
// instance because wasmtime's WASI writes in the background, on threads that can outlive the instance.
func owner(handle cgo.Handle) *Instance {
	defer func() { _ = recover() }() // Value panics for a deleted handle; handles are never reused
	return handle.Value().(*Instance)
}
