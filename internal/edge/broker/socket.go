package broker

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// socket is a connection without TLS or WebSocket. While nobody waits for it, only its descriptor is left: a net.Conn, its
// addresses and what the runtime has for it take as much memory as the broker itself needs for an idle client.
//
//	attached ─ detach: only parking waits for the client ─▶ detached
//	    ▲                                                      │ tryRead and Write still work, as long as they need not wait
//	    └──── a read or write waits, or packets come fast ─────┘
type socket struct {
	conn   *conn
	remote netip.AddrPort

	mu        sync.Mutex
	at        *attachment // nil: detached, and fd is the descriptor
	fd        int32
	waiting   int16 // calls of Read and Write that may wait
	watched   bool  // the epoll instance knows fd
	closed    bool
	readEnds  time.Time // the deadlines
	writeEnds time.Time
}

// attachment is what lets reads and writes of a socket wait.
type attachment struct {
	stream
	closer io.Closer // closes the descriptor, and leaves it counted by connlimit
	raw    syscall.RawConn

	// for tryRead: readable is made once, and passes what it has read by the other fields
	readable func(fd uintptr) bool
	buf      *[readSize]byte
	n        int
	err      error
}

// stream is a net.Conn at first, and an *os.File once the socket was detached: net.FileConn would duplicate the descriptor.
type stream interface {
	io.ReadWriter
	syscall.Conn
	SetReadDeadline(t time.Time) error
	SetWriteDeadline(t time.Time) error
}

// newSocket returns the socket of a new connection, or nil if a read of it is more than one of its descriptor.
func newSocket(n net.Conn, c *conn) *socket {
	of, ok := n.(stream)
	if !ok {
		return nil
	}
	closer := io.Closer(n)
	if layer, ok := n.(interface{ NetConn() net.Conn }); ok {
		closer = layer.NetConn()
	}
	at, err := newAttachment(of, closer)
	if err != nil {
		return nil
	}
	s := &socket{conn: c, at: at}
	if a, ok := n.RemoteAddr().(*net.TCPAddr); ok {
		s.remote = a.AddrPort()
	}
	return s
}

func newAttachment(of stream, closer io.Closer) (*attachment, error) {
	raw, err := of.SyscallConn()
	if err != nil {
		return nil, err
	}
	a := &attachment{stream: of, closer: closer, raw: raw}
	a.readable = func(fd uintptr) bool {
		a.buf, a.n, a.err = readNow(int(fd))
		return a.err != unix.EAGAIN
	}
	return a, nil
}

// detach leaves only the descriptor. It returns false if a read or write waits, or the socket is closed.
func (s *socket) detach() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.waiting > 0 {
		return false
	}
	if s.at == nil {
		return true
	}
	s.conn.server.parking.detaching.Lock()
	defer s.conn.server.parking.detaching.Unlock()
	fd, err := -1, error(nil)
	if failed := s.at.raw.Control(func(old uintptr) { fd, err = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0) }); failed != nil || err != nil {
		return false
	}
	s.at.closer.Close()
	s.at, s.fd = nil, int32(fd)
	return true
}

// attach lets reads and writes wait again.
func (s *socket) attach() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := s.attached()
	return err
}

// attached returns the attachment, which it makes if necessary. The lock is held.
func (s *socket) attached() (*attachment, error) {
	switch {
	case s.closed:
		return nil, net.ErrClosed
	case s.at != nil:
		return s.at, nil
	}
	if s.watched {
		s.conn.server.parking.forget(int(s.fd))
		s.watched = false
	}
	file := os.NewFile(uintptr(s.fd), "socket")
	at, err := newAttachment(file, file)
	if err == nil {
		err = errors.Join(file.SetReadDeadline(s.readEnds), file.SetWriteDeadline(s.writeEnds))
	}
	s.at = at
	return at, err
}

// wait begins a read or write that may wait. done ends it. The lock is held.
func (s *socket) wait() (*attachment, error) {
	at, err := s.attached()
	if err == nil {
		s.waiting++
	}
	return at, err
}

func (s *socket) done() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting--
}

// arm lets parking ask for one event when the socket is readable. It returns false if the socket is not detached.
func (s *socket) arm(p *parking, ticket uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.at != nil || !p.arm(int(s.fd), ticket, s.watched) {
		return false
	}
	s.watched = true
	return true
}

// tryRead reads into a new buffer. A socket that is attached waits until the deadline; one that is detached does not wait.
func (s *socket) tryRead() (buf *[readSize]byte, n int, err error) {
	s.mu.Lock()
	at := s.at
	if at == nil {
		defer s.mu.Unlock()
		if s.closed {
			return nil, 0, net.ErrClosed
		}
		if buf, n, err = readNow(int(s.fd)); err == unix.EAGAIN {
			err = os.ErrDeadlineExceeded
		}
		return buf, n, err
	}
	s.mu.Unlock()
	if err := at.raw.Read(at.readable); err != nil {
		return nil, 0, err
	}
	buf, at.buf = at.buf, nil
	return buf, at.n, at.err
}

// readNow reads into a new buffer. Without an error there is a buffer, and at least one byte in it.
func readNow(fd int) (buf *[readSize]byte, n int, err error) {
	buf = readBuffers.Get().(*[readSize]byte)
	for err = unix.EINTR; err == unix.EINTR; {
		n, err = unix.Read(fd, buf[:])
	}
	if err == nil && n == 0 {
		err = io.EOF
	}
	if err != nil {
		readBuffers.Put(buf)
		return nil, 0, err
	}
	return buf, n, nil
}

// Read implements io.Reader.
func (s *socket) Read(p []byte) (int, error) {
	s.mu.Lock()
	at, err := s.wait()
	s.mu.Unlock()
	if err != nil {
		return 0, err
	}
	defer s.done()
	return at.Read(p)
}

// Write implements io.Writer. If the kernel has no room for all, a detached socket is attached, and its reader has to go on.
func (s *socket) Write(p []byte) (n int, err error) {
	s.mu.Lock()
	detached := s.at == nil && !s.closed
	if detached {
		if n, err = writeNow(int(s.fd), p); n == len(p) || err != nil {
			s.mu.Unlock()
			return n, err
		}
	}
	at, err := s.wait()
	s.mu.Unlock()
	if err != nil {
		return n, err
	}
	defer s.done()
	if detached {
		s.conn.server.parking.wake(s.conn)
	}
	more, err := at.Write(p[n:])
	return n + more, err
}

// writeNow writes what the kernel has room for.
func writeNow(fd int, p []byte) (n int, err error) {
	for err = unix.EINTR; err == unix.EINTR; {
		n, err = unix.Write(fd, p)
	}
	if err == unix.EAGAIN {
		err = nil
	}
	return max(n, 0), err
}

// SetReadDeadline sets the deadline of reads.
func (s *socket) SetReadDeadline(t time.Time) error {
	return s.setDeadline(&s.readEnds, t, stream.SetReadDeadline)
}

// SetWriteDeadline sets the deadline of writes.
func (s *socket) SetWriteDeadline(t time.Time) error {
	return s.setDeadline(&s.writeEnds, t, stream.SetWriteDeadline)
}

// setDeadline keeps a deadline for when the socket is attached, and sets it if it is.
func (s *socket) setDeadline(ends *time.Time, t time.Time, set func(stream, time.Time) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	*ends = t
	if s.at == nil || s.closed {
		return nil
	}
	return set(s.at.stream, t)
}

// RemoteAddr returns the client's address, also when the client is gone.
func (s *socket) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(s.remote) }

// control calls a function with the descriptor. The lock is held.
func (s *socket) control(do func(fd int) error) (err error) {
	switch {
	case s.closed:
		return net.ErrClosed
	case s.at == nil:
		return do(int(s.fd))
	}
	return errors.Join(s.at.raw.Control(func(fd uintptr) { err = do(int(fd)) }), err)
}

// CloseWrite ends what the client gets.
func (s *socket) CloseWrite() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.control(func(fd int) error { return unix.Shutdown(fd, unix.SHUT_WR) })
}

// abort closes the socket so that it leaves no state in the kernel.
func (s *socket) abort() {
	s.mu.Lock()
	_ = s.control(func(fd int) error { // fails if the socket is closed
		return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	})
	s.mu.Unlock()
	s.Close()
	s.conn.server.parking.wake(s.conn)
}

// Close implements io.Closer.
func (s *socket) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return net.ErrClosed
	}
	s.closed = true
	s.conn.entry.Leave()
	if s.at != nil {
		return s.at.closer.Close()
	}
	return unix.Close(int(s.fd))
}
