package engine

// #cgo CFLAGS: -O2 -Wall
// #include "tw.h"
// #include <stdlib.h>
import "C"

import (
	"unsafe"

	// Its #cgo lines bring libwasmtime.a to the link. Its Go API, which knows no components, is not used.
	_ "github.com/bytecodealliance/wasmtime-go/v39"
)

// cString gives a string to C until free is called.
func cString(s string) (p *C.char, free func()) {
	p = C.CString(s)
	return p, func() { C.free(unsafe.Pointer(p)) }
}

// taken turns a message in C's memory into a string, and frees it; "" for NULL.
func taken(p *C.char) string {
	if p == nil {
		return ""
	}
	defer C.tw_free_error(p)
	return C.GoString(p)
}

// zeroed is memory of C's, for C.free. ErrStarved when there is none.
func zeroed[T any]() (*T, error) {
	var t T
	p := (*T)(C.tw_zeroed(C.size_t(unsafe.Sizeof(t))))
	if p == nil {
		return nil, ErrStarved
	}
	return p, nil
}

// spare lets n allocations of the C half succeed from now on, and no more; negative: all. For tests.
func spare(n int64) { C.tw_spare = C.int64_t(n) }

func bytePtr(b []byte) *C.uint8_t { return (*C.uint8_t)(unsafe.SliceData(b)) }

// member reads a pointer out of a C union.
func member[P any](union unsafe.Pointer) P { return *(*P)(union) }

// nameOf is a name that C lends.
func nameOf(p *C.char, n C.size_t) string { return C.GoStringN(p, C.int(n)) }

// standBack chooses how guests that compute for long stand back; for tests.
func standBack(byIdle bool) { C.tw_stand_back(C.bool(byIdle)) }
