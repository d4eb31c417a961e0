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

// Account adds up what several instances use (a pod's), and bounds it. It is safe for concurrent use.
type Account struct {
	c    *C.tw_account // in C's memory: the guests' threads write to it
	live atomic.Int64
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
