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

// Account adds up and limits the resources of several instances, such as all instances of a pod. It is safe for
// concurrent use.
type Account struct {
	c      *C.tw_account // in C memory, because the guests' threads write to it
	within *Account      // keeps alive what c.within points to; nil if unset
	live   atomic.Int64
}

// NewAccount makes an account. The memory parameter limits the sum of the instances' linear memories and of what they take beside
// them (beyond 64 KiB each), in bytes; 0 means no limit. An instance that grows beyond the limit ends with ErrMemory at its next tick.
func NewAccount(memory uint64) *Account {
	a := &Account{c: (*C.tw_account)(C.calloc(1, C.size_t(unsafe.Sizeof(C.tw_account{}))))}
	runtime.AddCleanup(a, func(c *C.tw_account) { C.free(unsafe.Pointer(c)) }, a.c)
	a.SetMemory(memory)
	return a
}

// SetMemory changes the memory limit that NewAccount has set.
func (a *Account) SetMemory(limit uint64) {
	C.tw_account_set_limit(a.c, C.int64_t(min(limit, 1<<62)))
	runtime.KeepAlive(a)
}

// Held is a kind of resource that guests hold through the host, besides their own memory.
type Held int

// The kinds of resources that an Account counts.
const (
	HeldFiles     Held = C.TW_FILES     // open files and directories
	HeldResources Held = C.TW_RESOURCES // resources of the host: streams, pollables, timers, fields, ...
	HeldBytes     Held = C.TW_BYTES     // bytes that the host stores for resources
)

// Within makes everything that this account holds also count towards the parent account. For example, the account of a
// pod is within the account of its worker. Call Within before any instance uses the account.
func (a *Account) Within(parent *Account) {
	a.within, a.c.within = parent, parent.c
}

// Bound limits how much of one kind all instances together may hold; 0 means no limit. Beyond the limit, opening a file
// fails with EMFILE. Making any other resource ends the guest's call with ErrHandles.
func (a *Account) Bound(what Held, most int64) {
	C.tw_account_bound(a.c, C.int(what), C.int64_t(most))
	runtime.KeepAlive(a)
}

// Take adds n to the amount that is held of one kind. If the sum would exceed a limit, Take adds nothing and returns
// false. A nil Account has no limits.
func (a *Account) Take(what Held, n int64) bool {
	if a == nil {
		return true
	}
	defer runtime.KeepAlive(a)
	return bool(C.tw_take(a.c, C.int(what), C.int64_t(n)))
}

// Give subtracts n from the amount that is held of one kind, to undo a Take.
func (a *Account) Give(what Held, n int64) {
	if a != nil {
		C.tw_give(a.c, C.int(what), C.int64_t(n))
		runtime.KeepAlive(a)
	}
}

// Held returns how much of one kind the instances hold now.
func (a *Account) Held(what Held) int64 { return a.load(&a.c.held[what]) }

// SetCPU limits the CPU time of all instances together to the given quota in each period. Beyond the quota, their
// threads sleep until the next period. That sleep does not use up a guest's compute budget. A quota of 0 removes the
// limit.
func (a *Account) SetCPU(quota, period time.Duration) {
	if quota <= 0 || period <= 0 {
		quota, period = 0, 0
	}
	C.tw_account_set_cpu(a.c, C.int64_t(quota), C.int64_t(period))
	runtime.KeepAlive(a)
}

// Memory returns the sum that NewAccount limits, at the latest ticks, in bytes.
func (a *Account) Memory() uint64 { return uint64(max(a.load(&a.c.memory), 0)) }

// MemoryPeak returns the highest value of Memory so far.
func (a *Account) MemoryPeak() uint64 { return uint64(a.load(&a.c.peak)) }

// CPU returns the CPU time that guests have used up to the latest ticks. It includes closed instances.
func (a *Account) CPU() time.Duration { return time.Duration(a.load(&a.c.cpu)) }

// Throttled returns the total time that guests' threads have slept because of the CPU quota.
func (a *Account) Throttled() time.Duration { return time.Duration(a.load(&a.c.throttled)) }

// Instances returns the number of instances, including closed instances that are still waiting in WASI.
func (a *Account) Instances() int { return int(a.live.Load()) }

// addInstances adds n to the number of instances. For a nil Account it does nothing.
func (a *Account) addInstances(n int64) {
	if a != nil {
		a.live.Add(n)
	}
}

func (a *Account) limit() uint64 { return uint64(a.load(&a.c.limit)) }

func (a *Account) load(p *C.int64_t) int64 {
	defer runtime.KeepAlive(a)
	return int64(C.tw_load(p))
}
