package connlimit

import (
	"cmp"
	"container/list"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"sync"
	"time"
)

// Config bounds the connections of one address. The zero value has the defaults.
type Config struct {
	// Max is how many connections there may be at a time; 1024 by default.
	Max int `json:"max,omitempty"`
	// MaxPerPeer is how many of them may come from one IP address; half of Max by default, and a negative number sets no
	// bound. A loopback address stands for all programs of the machine and has no bound.
	MaxPerPeer int `json:"maxPerPeer,omitempty"`
	// HeaderTimeout bounds the time for a TLS handshake, and that for the first request after it; 10 s by default.
	HeaderTimeout time.Duration `json:"headerTimeout,omitempty"`
	// IdleTimeout is how long a connection without requests is kept; 5 minutes by default.
	IdleTimeout time.Duration `json:"idleTimeout,omitempty"`
	// MaxHeaderBytes bounds the header of a request; 64 KiB by default.
	MaxHeaderBytes int `json:"maxHeaderBytes,omitempty"`
	// Files is how many descriptors of the process a connection may come to hold; 1 by default.
	Files int `json:"files,omitempty"`
}

func (c Config) withDefaults() Config {
	c.Max = cmp.Or(c.Max, 1024)
	c.MaxPerPeer = cmp.Or(c.MaxPerPeer, max(c.Max/2, 1))
	c.HeaderTimeout = cmp.Or(c.HeaderTimeout, 10*time.Second)
	c.IdleTimeout = cmp.Or(c.IdleTimeout, 5*time.Minute)
	c.MaxHeaderBytes = cmp.Or(c.MaxHeaderBytes, 64<<10)
	c.Files = cmp.Or(c.Files, 1)
	return c
}

// Reasons why a connection was not taken, or was closed before its time. They are the keys of Stats.Rejected.
const (
	// ReasonMax, ReasonPeer and ReasonFiles are of connections that were refused: all others were busy, all others of the
	// same peer, or the process has no descriptors to spare.
	ReasonMax   = "max"
	ReasonPeer  = "peer"
	ReasonFiles = "files"
	// ReasonDisplaced is of connections that were not busy and were closed for a newcomer.
	ReasonDisplaced = "displaced"
	// ReasonExpired is of connections whose first request did not come in time.
	ReasonExpired = "expired"
)

// ErrRefused is the error of Admit.
var ErrRefused = errors.New("too many connections")

// Stats are the figures of a Limiter.
type Stats struct {
	Name string
	// Open is the number of connections at this moment.
	Open int
	// Rejected counts connections by reason since the Limiter was made.
	Rejected map[string]uint64
}

// Limiter admits the connections of one address. Close it when the address is no longer listened at.
type Limiter struct {
	Config
	name  string
	group *Group

	mu       sync.Mutex
	open     int
	peers    map[string]int // connections by IP address, where that is bounded
	fresh    list.List      // of *Conn, new ones, the oldest first
	idle     list.List      // of *Conn, idle ones, the longest first
	rejected map[string]uint64
	report   report
}

// report is what the next line of the log will say.
type report struct {
	counts map[string]uint64
	peer   string // of the last one
	timer  *time.Timer
}

// Close takes the Limiter out of its Group. Its connections stay counted until they leave.
func (l *Limiter) Close() {
	l.group.mu.Lock()
	delete(l.group.limiters, l)
	l.group.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.report.timer != nil {
		l.report.timer.Stop()
	}
}

// Stats returns the figures.
func (l *Limiter) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Stats{Name: l.name, Open: l.open, Rejected: maps.Clone(l.rejected)}
}

// Conn is a connection that was admitted. Its methods may be called in any order and on nil.
type Conn struct {
	limiter *Limiter
	peer    string // the key of Limiter.peers; empty: not counted there
	close   func() // nil: cannot be displaced yet

	// The limiter's lock guards the rest.
	at         *list.Element // in Limiter.fresh or Limiter.idle; nil when busy or gone
	active     int           // requests under way
	since      time.Time     // when it was admitted
	hadRequest bool          // there was a request
	late       bool          // it was counted as expired
	gone       bool
}

// minAge is how long a new connection is left alone by those of other peers that come after it through a Listener, so that a
// client that sends its request at once is served in the middle of a flood.
const minAge = 100 * time.Millisecond

// Admit counts a connection in; the Conn's Leave counts it out. close ends the connection when it is displaced; it is called in
// a goroutine of the newcomer and after the connection was counted out. A nil close keeps it from being displaced until
// Conn.Closable. The error is ErrRefused.
func (l *Limiter) Admit(peer net.Addr, close func()) (*Conn, error) {
	c := &Conn{limiter: l, peer: l.peerOf(peer), close: close, since: time.Now()}
	displaced, reason := l.admit(c)
	if displaced != nil {
		l.reject(ReasonDisplaced, peer)
		displaced()
	}
	if reason != "" {
		l.reject(reason, peer)
		return nil, fmt.Errorf("%w (%s)", ErrRefused, reason)
	}
	return c, nil
}

// admit makes room if it must. displaced closes the connection that had to go.
func (l *Limiter) admit(c *Conn) (displaced func(), refused string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case c.peer != "" && l.peers[c.peer] >= l.MaxPerPeer:
		refused = ReasonPeer
	case l.open >= l.Max:
		refused = ReasonMax
	case !l.group.take(l.Files):
		refused = ReasonFiles
	}
	if refused != "" {
		victim := l.victim(refused, c.peer)
		if victim == nil {
			return nil, refused
		}
		displaced = victim.close
		l.leave(victim)
		if !l.group.take(l.Files) { // another address was quicker
			return displaced, ReasonFiles
		}
	}
	l.open++
	if c.peer != "" {
		l.peers[c.peer]++
	}
	c.at = l.fresh.PushBack(c)
	return displaced, ""
}

// patience is how long the next connection should wait before it is accepted, lest it displace one that is younger than minAge.
// Where only the bound of a peer is reached nobody waits: others would as well.
func (l *Limiter) acceptDelay() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open < l.Max {
		return 0
	}
	victim := l.victim(ReasonMax, "")
	if victim == nil || victim.hadRequest {
		return 0
	}
	return minAge - time.Since(victim.since)
}

// victim chooses the connection that is closed for a newcomer: the oldest new one while these have more than a quarter of the
// room, otherwise the one that has been idle for the longest. So new ones cannot drive out all idle ones, nor the other way
// round.
func (l *Limiter) victim(reason, peer string) *Conn {
	first, second := &l.idle, &l.fresh
	if l.fresh.Len() > l.Max/4 {
		first, second = second, first
	}
	for _, from := range []*list.List{first, second} {
		for e := from.Front(); e != nil; e = e.Next() {
			if c := e.Value.(*Conn); c.close != nil && (reason != ReasonPeer || c.peer == peer) {
				return c
			}
		}
	}
	return nil
}

// leave counts a connection out, once.
func (l *Limiter) leave(c *Conn) {
	if c.gone {
		return
	}
	c.gone = true
	c.unlist()
	l.open--
	l.group.release(l.Files)
	if c.peer == "" {
		return
	}
	if l.peers[c.peer]--; l.peers[c.peer] == 0 {
		delete(l.peers, c.peer)
	}
}

// unlist takes a connection out of the list that it is in.
func (c *Conn) unlist() {
	if c.at == nil {
		return
	}
	from := &c.limiter.fresh
	if c.hadRequest {
		from = &c.limiter.idle
	}
	from.Remove(c.at)
	c.at = nil
}

// Begin says that a request has come whole.
func (c *Conn) Begin() {
	if c == nil {
		return
	}
	c.limiter.mu.Lock()
	defer c.limiter.mu.Unlock()
	c.active++
	c.unlist()
	c.hadRequest = true
}

// End says that a request has been answered.
func (c *Conn) End() {
	if c == nil {
		return
	}
	c.limiter.mu.Lock()
	defer c.limiter.mu.Unlock()
	if c.active--; c.active == 0 && !c.gone {
		c.at = c.limiter.idle.PushBack(c)
	}
}

// Closable says how the connection is closed, if Admit did not know it.
func (c *Conn) Closable(close func()) {
	c.limiter.mu.Lock()
	defer c.limiter.mu.Unlock()
	c.close = close
}

// Leave says that the connection is closed.
func (c *Conn) Leave() {
	if c == nil {
		return
	}
	c.limiter.mu.Lock()
	defer c.limiter.mu.Unlock()
	c.limiter.leave(c)
}

// expired counts a connection whose time for the first request is over.
func (c *Conn) expired(peer net.Addr) {
	c.limiter.mu.Lock()
	counts := !c.hadRequest && !c.gone && !c.late
	c.late = true
	c.limiter.mu.Unlock()
	if counts {
		c.limiter.reject(ReasonExpired, peer)
	}
}

// peerOf is the key under which a peer's connections are counted, empty if they are not. IPv6 peers are told apart by their
// /64, which is what one machine has (RFC 4291, 2.5.4).
func (l *Limiter) peerOf(a net.Addr) string {
	if l.MaxPerPeer < 0 || a == nil {
		return ""
	}
	at, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return "" // a unix socket
	}
	ip := at.Addr().Unmap().WithZone("")
	if ip.IsLoopback() {
		return ""
	}
	if ip.Is6() {
		prefix, err := ip.Prefix(64)
		if err == nil {
			return prefix.String()
		}
	}
	return ip.String()
}

// reject counts a connection, and logs it: at once if nothing was logged lately, otherwise with those that follow.
func (l *Limiter) reject(reason string, peer net.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.rejected == nil {
		l.rejected = map[string]uint64{}
	}
	l.rejected[reason]++
	r := &l.report
	if r.counts == nil {
		r.counts = map[string]uint64{}
	}
	r.counts[reason]++
	if peer != nil {
		r.peer = peer.String()
	}
	if r.timer == nil {
		l.logReport()
		r.timer = time.AfterFunc(logInterval, l.flush)
	}
}

// flush logs the rejections since the last line.
func (l *Limiter) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.report.timer = nil
	if len(l.report.counts) > 0 {
		l.logReport()
		l.report.timer = time.AfterFunc(logInterval, l.flush)
	}
}

// write logs the report and empties it.
func (l *Limiter) logReport() {
	args := []any{"address", l.name, "peer", l.report.peer, "open", l.open, "max", l.Max}
	for _, reason := range []string{ReasonMax, ReasonPeer, ReasonFiles, ReasonDisplaced, ReasonExpired} {
		if n := l.report.counts[reason]; n > 0 {
			args = append(args, "rejected_"+reason, n)
		}
	}
	l.report.counts = nil
	l.group.log.Warn("connections were rejected", args...)
}
