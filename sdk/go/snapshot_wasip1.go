package tripodgrpc

import (
	"errors"
	"runtime"
	"runtime/debug"
	"unsafe"
)

// The host can run main once for a pod and begin each request in a copy of the memory that main has left
// (tripod:grpc/snapshot in sdk/wit/tripod-grpc-raw.wit). What must differ between the copies is renewed here: the state
// of the runtime's random number generator, which feeds math/rand, maps, and hash/maphash. crypto/rand has no state.

//go:wasmimport wasi_snapshot_preview1 random_get
func randomGet(to unsafe.Pointer, size uint32) uint32

// runtimeRand returns the next value of the runtime's generator.
//
//go:linkname runtimeRand runtime.rand
func runtimeRand() uint64

// chacha8 is the state of the runtime's generator (internal/chacha8rand.State): n of the values in buf are random, the
// first i of them are used, and seed and c determine the values that follow.
type chacha8 struct {
	buf     [32]uint64
	seed    [4]uint64
	i, n, c uint32
}

// generator is the state of the runtime's generator, once prepare has found it.
var generator *chacha8

var errGenerator = errors.New("the state of the Go runtime's random number generator was not found; a newer version of the SDK may know this version of Go")

// prepare is tripod:grpc/snapshot#prepare: func() -> result<u32, string>.
//
//go:wasmexport tripod:grpc/snapshot@0.1.0#prepare
func prepare() unsafe.Pointer {
	_, err := server()
	if err == nil && !findGenerator() {
		err = errGenerator
	}
	if err != nil {
		return lowerText(err)
	}
	// Complete the collection and the sweeping that the initialization has begun. Each instance would do it again, in
	// pages of its own.
	runtime.GC()
	return lowerReadings()
}

// clockReadings is how often the SDK has asked for the time of day before the first request.
var clockReadings uint32

// lowerReadings writes to result how often the runtime itself has asked for random values and for the time of day, once
// when it started, and at each collection, for its statistics, and how often the SDK has. It leaves the runtime's caches of
// memory as they are, unlike runtime.ReadMemStats.
func lowerReadings() unsafe.Pointer {
	var gc debug.GCStats
	debug.ReadGCStats(&gc)
	result.low, result.keep, result.details = lowResult{}, nil, nil
	result.low.status.code = 1 + uint32(gc.NumGC) + clockReadings
	return unsafe.Pointer(&result.low)
}

// findGenerator finds the state of the runtime's generator by its next values, and proves it by changing them.
func findGenerator() bool {
	// Goroutines run on one thread, whose state is among the static data, below the heap.
	heap := uintptr(unsafe.Pointer(new([1024]byte))) &^ 7
	for range 3 { // the values can be the last ones before the generator makes new ones
		// The complements of the values, because the values must not be anywhere else in memory.
		a, b := ^runtimeRand(), ^runtimeRand()
		for at := heap - unsafe.Sizeof(chacha8{}); at >= unsafe.Sizeof(chacha8{}); at -= 8 {
			if *(*uint64)(pointer(uint32(at))) == ^b && *(*uint64)(pointer(uint32(at - 8))) == ^a && proven(at) {
				return true
			}
		}
	}
	return false
}

// proven reports whether the value at an address is the last one that a generator has returned, and sets generator.
func proven(at uintptr) bool {
	const past = unsafe.Offsetof(chacha8{}.seed)
	for k := uintptr(1); k < 32; k++ { // its index in buf
		s := (*chacha8)(pointer(uint32(at - k*8)))
		if uintptr(s.i) != k+1 || s.n > 32 || s.i >= s.n || s.c > 12 || at-k*8+past < at {
			continue
		}
		const probe = 0x5eed5eed5eed5eed
		was := s.buf[s.i]
		s.buf[s.i] = probe
		if runtimeRand() == probe {
			generator = s
			return true
		}
		s.buf[k+1] = was
	}
	return false
}

// renew gives this instance random values of its own, if it has begun from a snapshot.
func renew() {
	s := generator
	if s == nil {
		return
	}
	generator = nil
	if randomGet(unsafe.Pointer(s), uint32(unsafe.Offsetof(s.i))) != 0 {
		panic("tripodgrpc: no random values")
	}
	s.i, s.n, s.c = 0, uint32(len(s.buf)), 0
}
