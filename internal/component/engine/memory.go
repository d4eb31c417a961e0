package engine

// #include "tw.h"
// #include <stdlib.h>
import "C"

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"unsafe"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
)

// slots makes an engine take the memories of its instances from memory.c. They begin with images of ours, so no module of
// such an engine may have data of its own, which wasmtime would map.
func slots(c *C.wasm_config_t) { C.tw_use_slots(c) }

var (
	pagemapOnce sync.Once
	errTraced   error // openPagemap's
)

// openPagemap opens the file of this process that shows which pages a guest has changed, once for all engines. It returns
// an error only if other processes could trace this one afterwards.
func openPagemap(logger *slog.Logger) error {
	pagemapOnce.Do(func() {
		var fd int
		err := asDumpable(func() (err error) {
			fd, err = unix.Open("/proc/self/pagemap", unix.O_RDONLY|unix.O_CLOEXEC, 0)
			return err
		})
		if err == nil {
			err = scanPages(fd)
		}
		if errTraced != nil {
			return
		}
		if err != nil {
			logger.Info("memory is mapped again for each instance, because changed pages cannot be found (Linux 6.7 can)", "err", err)
			return
		}
		C.tw_set_pagemap(C.int(fd))
	})
	return errTraced
}

// asDumpable calls open, and again while the process is dumpable if the first call may not open a file of the process. The
// files of a process that has changed its user belong to root unless it is dumpable, which also allows other processes of
// the user to trace it, so it is dumpable for this moment only.
func asDumpable(open func() error) error {
	err := open()
	if err == nil || !errors.Is(err, unix.EACCES) {
		return err
	}
	was, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
	if err != nil {
		return err
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0); err != nil {
		return err
	}
	defer func() {
		if was != 1 {
			was = 0 // 2 (fs.suid_dumpable, PR_SET_DUMPABLE(2const)) cannot be set; nobody can trace either
		}
		if err := unix.Prctl(unix.PR_SET_DUMPABLE, uintptr(was), 0, 0, 0); err != nil {
			errTraced = fmt.Errorf("make this process undumpable: %w", err)
		}
	}()
	return open()
}

// scanPages tries the ioctl on no pages.
func scanPages(fd int) error {
	if why := C.tw_scan_pages(C.int(fd)); why != 0 {
		_ = unix.Close(fd)
		return unix.Errno(why)
	}
	return nil
}

// newMemoryImage makes an image of a memory whose data is given, for instances of a detached module. tw_image_close closes it.
func newMemoryImage(size int, data []wasmbin.Data) (*C.tw_image, error) {
	fd, begin, end, err := memoryFile(data)
	if err != nil {
		return nil, err
	}
	i := C.tw_image_new(C.int(fd), C.size_t(begin), C.size_t(end), C.size_t(size))
	if i == nil {
		_ = unix.Close(fd)
		return nil, ErrStarved
	}
	return i, nil
}

// memoryFile writes data to a file in memory that nobody can change. The file begins at the address begin.
func memoryFile(data []wasmbin.Data) (fd int, begin, end uint64, err error) {
	if len(data) > 0 {
		begin = uint64(data[0].Offset)
		end = begin + spanOf(data)
	}
	if fd, err = unix.MemfdCreate("memory", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING); err != nil {
		return -1, 0, 0, fmt.Errorf("memory image: %w: %w", err, errdefs.ErrResourceExhausted)
	}
	for _, d := range data {
		for b, at := d.Bytes, int64(d.Offset)-int64(begin); len(b) > 0 && err == nil; {
			var n int
			n, err = unix.Pwrite(fd, b, at)
			b, at = b[max(n, 0):], at+int64(n)
		}
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_GROW|unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, 0, 0, fmt.Errorf("memory image: %w: %w", err, errdefs.ErrResourceExhausted)
	}
	return fd, begin, end, nil
}

// memoryBytes returns a memory. It is valid until the memory grows or its store is deleted.
func memoryBytes(cx *C.wasmtime_context_t, m *C.wasmtime_memory_t) []byte {
	return unsafe.Slice((*byte)(C.wasmtime_memory_data(cx, m)), int(C.wasmtime_memory_data_size(cx, m)))
}

// initialMemory makes the image of a detached module's memory on first use: it is what an instance of the memory's own
// module begins with, beside the pool. The caller holds c.mu.
func (c *Code) initialMemory(l *link) error {
	if l.memory == nil {
		return nil
	}
	store := C.wasmtime_store_new(c.engine.plain, nil, nil)
	defer C.wasmtime_store_delete(store)
	cx := C.wasmtime_store_context(store)
	var memory C.wasmtime_instance_t
	var trap *C.wasm_trap_t
	if err := failure(C.wasmtime_instance_new(cx, l.memory, nil, 0, &memory, &trap)); err != nil {
		return fmt.Errorf("initial memory: %w: %w", err, errdefs.ErrResourceExhausted)
	}
	if trap != nil {
		C.wasm_trap_delete(trap)
		return invalid("the data of the guest does not fit into its memory")
	}
	name, free := cString(wasmbin.MemoryExport)
	defer free()
	var e C.wasmtime_extern_t
	if !C.wasmtime_instance_export_get(cx, &memory, name, C.size_t(len(wasmbin.MemoryExport)), &e) {
		return fmt.Errorf("initial memory: no export %s", wasmbin.MemoryExport)
	}
	bytes := memoryBytes(cx, (*C.wasmtime_memory_t)(unsafe.Pointer(&e.of)))
	data, _ := nonZero(bytes)
	image, err := newMemoryImage(len(bytes), data)
	if err != nil {
		return err
	}
	l.c.detached.initial = image
	l.frees = append(l.frees, func() { C.tw_image_close(image) })
	C.wasmtime_module_delete(l.memory)
	l.memory = nil
	return nil
}
