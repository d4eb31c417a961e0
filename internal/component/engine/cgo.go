package engine

// #cgo CFLAGS: -I${SRCDIR}/../../../build/engine/include -O2 -Wall -Wextra -Wshadow -Wvla -fstack-protector-strong -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2
// #cgo LDFLAGS: -L${SRCDIR}/../../../build/engine/lib -lwasmtime -lm -ldl -pthread
// #include "tw.h"
// #include <stdlib.h>
import "C"

import (
	_ "embed"
	"strings"
	"unsafe"
)

// The files of the crate that hack/engine.sh builds. They make this package depend on it: go build does not see that the
// library changed.
var (
	//go:embed wasmtime/Cargo.toml
	crateManifest string
	//go:embed wasmtime/Cargo.lock
	crateLock string
	//go:embed wasmtime/lib.rs
	crateSource string
)

// wasmtimeVersion returns the version of wasmtime in the crate's lock file.
func wasmtimeVersion() string {
	_, after, _ := strings.Cut(crateLock, "name = \"wasmtime\"\nversion = \"")
	version, _, _ := strings.Cut(after, "\"")
	return version
}

// cString copies a string to C memory. The caller must call free.
func cString(s string) (p *C.char, free func()) {
	p = C.CString(s)
	return p, func() { C.free(unsafe.Pointer(p)) }
}

// takeString copies a message from C memory and frees the original; it returns "" for NULL.
func takeString(p *C.char) string {
	if p == nil {
		return ""
	}
	defer C.tw_free_error(p)
	return C.GoString(p)
}

// callocOne allocates a zeroed T in C memory, to be freed by C.free. It returns ErrStarved if there is no memory.
func callocOne[T any]() (*T, error) {
	var t T
	p := (*T)(C.tw_zeroed(C.size_t(unsafe.Sizeof(t))))
	if p == nil {
		return nil, ErrStarved
	}
	return p, nil
}

// failAllocsAfter makes all allocations of the C half fail after the next n allocations. With a negative n, allocations
// succeed again. For tests.
func failAllocsAfter(n int64) { C.tw_spare = C.int64_t(n) }

func bytePtr(b []byte) *C.uint8_t { return (*C.uint8_t)(unsafe.SliceData(b)) }

// unionPointer reads a pointer from a C union.
func unionPointer[P any](union unsafe.Pointer) P { return *(*P)(union) }

// nameOf copies a name from C memory.
func nameOf(p *C.char, n C.size_t) string { return C.GoStringN(p, C.int(n)) }

// yieldByIdle selects how guests that compute for a long time yield: by SCHED_IDLE if on is true, otherwise by
// sleeping. For tests.
func yieldByIdle(on bool) { C.tw_stand_back(C.bool(on)) }

// ownMemory returns the guest's memory. It is valid until the memory grows or the instance is closed. For tests.
func (i *Instance) ownMemory() []byte { return memoryBytes(i.c.cx, &i.c.guest.memory) }

// growMemory grows the guest's memory by a number of pages. For tests.
func (i *Instance) growMemory(pages uint64) error {
	var was C.uint64_t
	return failure(C.wasmtime_memory_grow(i.c.cx, &i.c.guest.memory, C.uint64_t(pages), &was))
}

// The bounds of what an image keeps: memories, and bytes in each. For tests.
const (
	maxWarm    = C.TW_MAX_WARM
	maxKept    = C.TW_MAX_KEPT
	maxAllWarm = C.TW_MAX_ALL_WARM
)

// warm returns the number of memories that a snapshot keeps for instances. For tests.
func (s *Snapshot) warm() int { return int(s.mem.nwarm) }

// findPages selects whether memory.c asks the kernel which pages have changed, and returns whether it did. For tests.
func findPages(on bool) bool { return bool(C.tw_find_pages(C.bool(on))) }
