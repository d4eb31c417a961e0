package dialer

import (
	"net/netip"
	"slices"
	"sync"
	"time"
)

const (
	// resolvedTime is how long a pod may connect to an address because a name that its rules allow has led there.
	resolvedTime = time.Minute
	// maxResolved bounds the addresses that a pod's resolved remembers, and maxNames the names of each.
	maxResolved = 1024
	maxNames    = 8
)

// resolved remembers which names have led to which addresses, for guests that resolve a name themselves and then connect
// to an address. Only the dialer's own lookups count, so a worker cannot claim a name for an address.
type resolved struct {
	mu    sync.Mutex
	addrs map[netip.Addr][]resolvedName
}

type resolvedName struct {
	name  string
	until time.Time
}

// add remembers the addresses of names. At the limit it forgets others.
func (r *resolved) add(names []string, addrs []netip.Addr) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.addrs == nil {
		r.addrs = map[netip.Addr][]resolvedName{}
	}
	until := time.Now().Add(resolvedTime)
	for _, addr := range addrs {
		if _, known := r.addrs[addr]; !known && len(r.addrs) >= maxResolved {
			r.forget()
		}
		list := r.addrs[addr]
		for _, name := range names {
			list = slices.DeleteFunc(list, func(n resolvedName) bool { return n.name == name })
			list = append(list, resolvedName{name, until})
		}
		r.addrs[addr] = list[max(0, len(list)-maxNames):]
	}
}

// forget removes the addresses whose time is over or, if there are none, some address. The caller holds the lock.
func (r *resolved) forget() {
	now, some := time.Now(), netip.Addr{}
	for addr, list := range r.addrs {
		some = addr
		if list[len(list)-1].until.Before(now) {
			delete(r.addrs, addr)
		}
	}
	if len(r.addrs) >= maxResolved {
		delete(r.addrs, some)
	}
}

// names returns the names that have led to an address.
func (r *resolved) names(addr netip.Addr) (names []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	for _, n := range r.addrs[addr] {
		if n.until.After(now) {
			names = append(names, n.name)
		}
	}
	return names
}
