package engine

// #include "tw.h"
// #include <stdlib.h>
import "C"

import (
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"
)

// Account adds up what several instances use and hold (a pod's), and bounds it. It is safe for concurrent use.
type Account struct {
	c      *C.tw_account // in C's memory: the guests' threads write to it
	within *Account      // which c points to; nil: none
	live   atomic.Int64
}

// NewAccount makes an account with a limit of memory: the sum of the linear memories, in bytes; 0: none. An instance
// that grows beyond it ends with ErrMemory at its next tick.
func NewAccount(memory uint64) *Account {
	a := &Account{c: (*C.tw_account)(C.calloc(1, C.size_t(unsafe.Sizeof(C.tw_account{}))))}
	runtime.AddCleanup(a, func(c *C.tw_account) { C.free(unsafe.Pointer(c)) }, a.c)
	a.SetMemory(memory)
	return a
}

// SetMemory changes the limit.
func (a *Account) SetMemory(limit uint64) {
	C.tw_account_set_limit(a.c, C.int64_t(min(limit, 1<<62)))
	runtime.KeepAlive(a)
}

// Held is a kind of what guests hold of the worker through the host, beside memory of their own.
type Held int

// The kinds.
const (
	HeldFiles     Held = C.TW_FILES     // open files and directories
	HeldResources Held = C.TW_RESOURCES // resources of the host: streams, pollables, timers, fields …
	HeldBytes     Held = C.TW_BYTES     // bytes that the host keeps for resources
)

// Within has what this account counts of Held count for another one as well: that of all of a worker's pods. It is called
// before there are instances.
func (a *Account) Within(all *Account) {
	a.within, a.c.within = all, all.c
}

// Bound sets how much of a kind the instances may hold, all together; 0: no bound. What goes beyond is refused: an open
// file is EMFILE for the guest, a resource ends its call with ErrHandles.
func (a *Account) Bound(what Held, most int64) {
	C.tw_account_bound(a.c, C.int(what), C.int64_t(most))
	runtime.KeepAlive(a)
}

// Take counts n more of a kind, unless that is more than there may be. A nil Account counts nothing.
func (a *Account) Take(what Held, n int64) bool {
	if a == nil {
		return true
	}
	defer runtime.KeepAlive(a)
	return bool(C.tw_take(a.c, C.int(what), C.int64_t(n)))
}

// Give takes back what Take has counted.
func (a *Account) Give(what Held, n int64) {
	if a != nil {
		C.tw_give(a.c, C.int(what), C.int64_t(n))
		runtime.KeepAlive(a)
	}
}

// Held is how much of a kind the instances hold now.
func (a *Account) Held(what Held) int64 { return a.load(&a.c.held[what]) }

// SetCPU lets the instances run for quota in every period, all together; beyond, their threads sleep until the next
// period begins, and this sleep is not computing. A quota of 0 lifts it.
func (a *Account) SetCPU(quota, period time.Duration) {
	if quota <= 0 || period <= 0 {
		quota, period = 0, 0
	}
	C.tw_account_set_cpu(a.c, C.int64_t(quota), C.int64_t(period))
	runtime.KeepAlive(a)
}

// Memory is the sum of the linear memories at the last ticks, in bytes.
func (a *Account) Memory() uint64 { return uint64(max(a.load(&a.c.memory), 0)) }

// MemoryPeak is the largest that Memory has been.
func (a *Account) MemoryPeak() uint64 { return uint64(a.load(&a.c.peak)) }

// CPU is the time that guests have run up to the last ticks, with instances which are closed.
func (a *Account) CPU() time.Duration { return time.Duration(a.load(&a.c.cpu)) }

// Throttled is how long the threads of guests have slept for the CPU quota, all together.
func (a *Account) Throttled() time.Duration { return time.Duration(a.load(&a.c.throttled)) }

// Instances is how many instances there are, with those that are closed and still wait in WASI.
func (a *Account) Instances() int { return int(a.live.Load()) }

// use adds n instances. A nil Account counts none.
func (a *Account) use(n int64) {
	if a != nil {
		a.live.Add(n)
	}
}

func (a *Account) limit() uint64 { return uint64(a.load(&a.c.limit)) }

func (a *Account) load(p *C.int64_t) int64 {
	defer runtime.KeepAlive(a)
	return int64(C.tw_load(p))
}
