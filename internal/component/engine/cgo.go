package engine

// #cgo CFLAGS: -O2 -Wall
// #include "tw.h"
// #include <stdlib.h>
import "C"

import (
	"unsafe"

	// The #cgo lines of the imported package link libwasmtime.a. The Go API of that package is not used, because it
	// does not support components.
	_ "github.com/bytecodealliance/wasmtime-go/v39"
)

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
