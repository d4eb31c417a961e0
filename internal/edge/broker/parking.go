package broker

import (
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// parkAfter is how long a connection is silent before its goroutine ends.
	parkAfter = 5 * time.Millisecond
	// attachAfter is the number of packets that come fast before the socket is attached. To attach and detach it costs as much
	// as to wake it a few times.
	attachAfter = 8
	// parkingCheck is the time between two looks at the keep alives of parked connections.
	parkingCheck = 250 * time.Millisecond
	// burst is the number of new connections after which the process returns memory to the system, once no more of them come,
	// and at most every returnInterval: connecting takes several times the memory of an idle connection.
	burst          = 1000
	returnInterval = time.Minute
)

// errSilent is why a read ends when the client has said nothing for parkAfter.
var errSilent = errors.New("the client is silent")

// parking waits for the packets of silent connections, of which only the descriptor and the broker's own state are left: no
// goroutine, no buffer, and nothing of package net.
//
//	serve ─ silent for parkAfter ─▶ park ─ epoll: readable; keep alive is over; connection is closed ─▶ serve
type parking struct {
	file *os.File // the epoll instance
	raw  syscall.RawConn
	run  func(*conn) // goes on with a connection; it does not wait

	// detaching lets one connection at a time have its new descriptor: each thread that waits while the kernel enlarges the
	// table of descriptors is a thread that the runtime keeps.
	detaching sync.Mutex

	mu     sync.Mutex
	ticket uint64 // of the last connection that was parked
	parked map[uint64]*conn
	fresh  int // connections that were parked for the first time since the process returned memory
}

func newParking(run func(*conn)) (*parking, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("broker: epoll: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil { // or the runtime would not wait for it
		unix.Close(fd)
		return nil, fmt.Errorf("broker: epoll: %w", err)
	}
	p := &parking{file: os.NewFile(uintptr(fd), "epoll"), run: run, parked: map[uint64]*conn{}}
	if p.raw, err = p.file.SyscallConn(); err != nil {
		return nil, errors.Join(fmt.Errorf("broker: epoll: %w", err), p.file.Close())
	}
	return p, nil
}

// park takes a connection over from its goroutine. It returns false if the goroutine must go on.
func (p *parking) park(c *conn) bool {
	if !c.socket.detach() {
		return false
	}
	p.mu.Lock()
	p.ticket++
	armed := c.socket.arm(p, p.ticket)
	if armed {
		if c.ticket == 0 {
			p.fresh++
		}
		p.parked[p.ticket], c.ticket = c, p.ticket
	}
	p.mu.Unlock()
	if !armed {
		_ = c.socket.attach() // the next read has to wait; it fails if the socket is closed
		return false
	}
	c.mu.Lock()
	closing := c.closing
	if c.answers.len() == 0 {
		c.answers = fifo[answer]{}
	}
	c.mu.Unlock()
	return !closing || !p.take(c) // finish may have looked for it too early
}

// arm asks for one event when the connection is readable. watched tells whether the epoll instance knows it already.
func (p *parking) arm(fd int, ticket uint64, watched bool) (ok bool) {
	op := unix.EPOLL_CTL_ADD
	if watched {
		op = unix.EPOLL_CTL_MOD
	}
	event := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLONESHOT, Fd: int32(ticket), Pad: int32(ticket >> 32)}
	_ = p.raw.Control(func(epoll uintptr) { ok = unix.EpollCtl(int(epoll), op, fd, &event) == nil }) // fails if the broker is closed
	return ok
}

// forget ends the watch of a descriptor.
func (p *parking) forget(fd int) {
	_ = p.raw.Control(func(epoll uintptr) { _ = unix.EpollCtl(int(epoll), unix.EPOLL_CTL_DEL, fd, nil) }) // fails if the broker is closed
}

// take takes a connection back, and returns false if it is not parked.
func (p *parking) take(c *conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.parked[c.ticket] != c {
		return false
	}
	delete(p.parked, c.ticket)
	return true
}

// wake goes on with a connection if it is parked.
func (p *parking) wake(c *conn) {
	if p.take(c) {
		p.run(c)
	}
}

// wait goes on with the connections that are readable, until close.
func (p *parking) wait() {
	events := make([]unix.EpollEvent, 64)
	for {
		n := 0
		err := p.raw.Read(func(epoll uintptr) bool {
			n, _ = unix.EpollWait(int(epoll), events, 0) // interrupted: n is -1
			return n > 0
		})
		if err != nil {
			return
		}
		for _, e := range events[:n] {
			ticket := uint64(uint32(e.Fd)) | uint64(uint32(e.Pad))<<32
			p.mu.Lock()
			c := p.parked[ticket]
			delete(p.parked, ticket)
			p.mu.Unlock()
			if c != nil {
				p.run(c)
			}
		}
	}
}

// watch goes on with the connections whose keep alive is over, and returns memory after a burst, until stop is closed.
func (p *parking) watch(stop <-chan struct{}) {
	tick := time.NewTicker(parkingCheck)
	defer tick.Stop()
	before, returned := 0, time.Time{}
	for {
		select {
		case now := <-tick.C:
			p.expire(now)
			p.mu.Lock()
			over := p.fresh >= burst && p.fresh == before && now.Sub(returned) >= returnInterval
			if before = p.fresh; over {
				p.fresh = 0
			}
			p.mu.Unlock()
			if over {
				go debug.FreeOSMemory() // keep alives do not wait for it
				returned = now
			}
		case <-stop:
			return
		}
	}
}

// expire goes on with the connections whose keep alive is over.
func (p *parking) expire(now time.Time) {
	var late []*conn
	p.mu.Lock()
	for ticket, c := range p.parked {
		if c.in.late(c.keepAlive, now) {
			delete(p.parked, ticket)
			late = append(late, c)
		}
	}
	p.mu.Unlock()
	for _, c := range late {
		p.run(c)
	}
}

// close ends wait. From now on no connection is parked.
func (p *parking) close() { p.file.Close() }
