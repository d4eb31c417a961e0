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

// Config limits the connections to one address. Fields that are zero get their defaults.
type Config struct {
	// Max limits the number of connections; 1024 by default.
	Max int `json:"max,omitempty"`
	// MaxPerPeer limits the number of connections from one IPv4 address or one IPv6 /64; half of Max by default. A
	// negative value means no limit. Loopback addresses have no limit, because all programs of the machine share them.
	MaxPerPeer int `json:"maxPerPeer,omitempty"`
	// HeaderTimeout limits the TLS handshake, and then separately the wait for the first request; 10 s by default.
	HeaderTimeout time.Duration `json:"headerTimeout,omitempty"`
	// IdleTimeout limits how long a connection without requests is kept; 5 minutes by default.
	IdleTimeout time.Duration `json:"idleTimeout,omitempty"`
	// MaxHeaderBytes limits the header of a request, in bytes; 64 KiB by default.
	MaxHeaderBytes int `json:"maxHeaderBytes,omitempty"`
	// Files is the largest number of the process's descriptors that a connection can hold; 1 by default.
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

// Reasons why a connection was refused or closed early. They are the keys of Stats.Rejected.
const (
	// ReasonMax, ReasonPeer and ReasonFiles mean that the connection was refused: the limit for the address, for the
	// peer, or for the process's descriptors was reached, and all other connections were busy.
	ReasonMax   = "max"
	ReasonPeer  = "peer"
	ReasonFiles = "files"
	// ReasonDisplaced means that the connection was not busy and was closed to make room for another one.
	ReasonDisplaced = "displaced"
	// ReasonExpired means that the first request did not arrive in time.
	ReasonExpired = "expired"
)

// ErrRefused is the error that Admit returns, wrapped, for a refused connection.
var ErrRefused = errors.New("too many connections")

// Stats holds the figures of a Limiter.
type Stats struct {
	Name string
	// Open is the current number of connections.
	Open int
	// Rejected counts, by reason, the connections refused or closed early since the Limiter was made.
	Rejected map[string]uint64
}

// Limiter admits the connections to one address. Close it when the process no longer listens on the address.
type Limiter struct {
	Config
	name  string
	group *Group

	mu       sync.Mutex
	open     int
	peers    map[string]int // number of connections by peer (peerOf)
	fresh    list.List      // of *Conn: new connections, the oldest first
	idle     list.List      // of *Conn: idle connections, the longest idle first
	rejected map[string]uint64
	report   report
}

// report holds the rejections that the next log line will show.
type report struct {
	counts map[string]uint64 // by reason
	peer   string            // peer of the last rejection
	timer  *time.Timer
}

// Close removes the Limiter from its Group. Its connections remain counted until they leave.
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

// Stats returns the figures of the Limiter.
func (l *Limiter) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Stats{Name: l.name, Open: l.open, Rejected: maps.Clone(l.rejected)}
}

// Conn is an admitted connection. Its methods can be called in any order. On a nil Conn the methods do nothing, except
// Closable, which panics.
type Conn struct {
	limiter *Limiter
	peer    string // key of Limiter.peers; empty if not counted there
	close   func() // nil if the connection cannot be displaced yet

	// The limiter's lock guards the other fields.
	at         *list.Element // in Limiter.fresh or Limiter.idle; nil if busy or gone
	active     int           // number of running requests
	since      time.Time     // time of admission
	hadRequest bool
	late       bool // counted as expired
	gone       bool // no longer counted
}

// minAge is the age that a new connection must reach before later connections to a Listener can displace it. So a
// client that sends its request immediately is served even during a flood.
const minAge = 100 * time.Millisecond

// Admit counts a connection until Conn.Leave is called. If there is no room, it displaces another connection, that is,
// removes it from the counts and calls its close function. A connection that is admitted with a nil close function
// cannot be displaced until Conn.Closable sets the function. If no connection can be displaced, Admit returns
// ErrRefused.
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

// admit counts a connection, and first makes room for it if necessary. If a connection was displaced, the first result
// is the function that closes that connection; otherwise it is nil.
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
		if !l.group.take(l.Files) { // another address took the descriptors first
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

// acceptDelay returns how long Accept must wait so that the next connection does not displace a connection younger than
// minAge. If only the limit of one peer is reached, it returns 0, because waiting would also delay the other peers.
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

// victim chooses the connection to displace. If more than a quarter of Max connections are new, it prefers the oldest
// new connection. Otherwise it prefers the connection that has been idle longest. So new connections cannot displace
// all idle connections, and vice versa.
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

// leave removes a connection from the counts. A second call does nothing.
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

// unlist removes a connection from its list, if it is in one.
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

// Begin marks the connection busy. Call it when a request has arrived completely.
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

// End marks the end of a request. Call End once for each call of Begin, when the request has been answered.
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

// Closable sets the function that closes the connection. Call it if Admit was called with a nil close function.
func (c *Conn) Closable(close func()) {
	c.limiter.mu.Lock()
	defer c.limiter.mu.Unlock()
	c.close = close
}

// Leave removes the connection from the counts. Call it when the connection is closed.
func (c *Conn) Leave() {
	if c == nil {
		return
	}
	c.limiter.mu.Lock()
	defer c.limiter.mu.Unlock()
	c.limiter.leave(c)
}

// expired counts the connection as expired, unless a request has already arrived.
func (c *Conn) expired(peer net.Addr) {
	c.limiter.mu.Lock()
	counts := !c.hadRequest && !c.gone && !c.late
	c.late = true
	c.limiter.mu.Unlock()
	if counts {
		c.limiter.reject(ReasonExpired, peer)
	}
}

// peerOf returns the key under which a peer's connections are counted, or "" if they are not counted. IPv6 peers are
// distinguished by their /64, because one machine has a whole /64 (RFC 4291, 2.5.4).
func (l *Limiter) peerOf(a net.Addr) string {
	if l.MaxPerPeer < 0 || a == nil {
		return ""
	}
	at, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return "" // a Unix socket
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

// reject counts a rejection and logs it: immediately if there was no log line within the last logInterval, otherwise
// later, together with other rejections.
func (l *Limiter) reject(reason string, peer net.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rejected[reason]++
	r := &l.report
	r.counts[reason]++
	if peer != nil {
		r.peer = peer.String()
	}
	if r.timer == nil {
		l.logReport()
		r.timer = time.AfterFunc(logInterval, l.flush)
	}
}

// flush logs the rejections since the last log line, if there are any.
func (l *Limiter) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.report.timer = nil
	if len(l.report.counts) > 0 {
		l.logReport()
		l.report.timer = time.AfterFunc(logInterval, l.flush)
	}
}

// logReport logs the report and empties it.
func (l *Limiter) logReport() {
	args := []any{"address", l.name, "peer", l.report.peer, "open", l.open, "max", l.Max}
	for _, reason := range []string{ReasonMax, ReasonPeer, ReasonFiles, ReasonDisplaced, ReasonExpired} {
		if n := l.report.counts[reason]; n > 0 {
			args = append(args, "rejected_"+reason, n)
		}
	}
	clear(l.report.counts)
	l.group.log.Warn("connections were rejected", args...)
}
