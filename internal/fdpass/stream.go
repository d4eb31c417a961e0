package fdpass

import (
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// Conn is a byte stream with files: a *net.UnixConn, or a fake in tests.
type Conn interface {
	ReadMsgUnix(b, oob []byte) (n, oobn, flags int, addr *net.UnixAddr, err error)
}

// NoFiles returns a Conn for a peer that must not pass files. The kernel discards those that it passes (recvmsg(2)), and
// Stream.Read returns ErrFrame.
func NoFiles(conn *net.UnixConn) Conn { return noFiles{conn} }

type noFiles struct{ conn *net.UnixConn }

func (c noFiles) ReadMsgUnix(b, _ []byte) (n, oobn, flags int, addr *net.UnixAddr, err error) {
	return c.conn.ReadMsgUnix(b, nil)
}

// Stream reads the bytes of a connection, and keeps the files that come with them. The bytes need not be frames: OCI
// runtimes send other messages.
type Stream struct {
	conn Conn
	oob  []byte
	fds  []int // received, not yet taken
}

// NewStream makes a stream. The caller must Close it.
func NewStream(conn Conn) *Stream {
	return &Stream{conn: conn, oob: make([]byte, unix.CmsgSpace(4*MaxFiles))}
}

// Read implements io.Reader. Files that come with the bytes are kept even if it returns an error.
func (s *Stream) Read(b []byte) (int, error) {
	n, oobn, flags, _, err := s.conn.ReadMsgUnix(b, s.oob)
	keepErr := s.keepFiles(s.oob[:oobn])
	switch {
	case err != nil:
		return 0, err
	case keepErr != nil:
		return 0, keepErr
	case flags&unix.MSG_CTRUNC != 0:
		return 0, fmt.Errorf("%w: files were lost in transit (unexpected, or out of file descriptors)", ErrFrame)
	case n == 0 && len(b) > 0:
		return 0, io.EOF
	}
	return n, nil
}

// keepFiles stores the descriptors of a control message until they are taken.
func (s *Stream) keepFiles(oob []byte) error {
	if len(oob) == 0 {
		return nil
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrFrame, err)
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			continue // not descriptors, but credentials or timestamps
		}
		s.fds = append(s.fds, fds...)
	}
	if len(s.fds) > 4*MaxFiles {
		return fmt.Errorf("%w: %d files arrived without a frame", ErrFrame, len(s.fds))
	}
	return nil
}

// TakeOne returns the file that has been received. Closing it ends a read that is under way. It is an error if there is
// not exactly one.
func (s *Stream) TakeOne(name string) (*os.File, error) {
	if len(s.fds) != 1 {
		return nil, fmt.Errorf("%d files were passed instead of one", len(s.fds))
	}
	if err := unix.SetNonblock(s.fds[0], true); err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(s.fds[0]), name)
	s.fds = nil
	return file, nil
}

// Close closes received files that nobody has taken. It does not close the connection.
func (s *Stream) Close() {
	for _, fd := range s.fds {
		unix.Close(fd)
	}
	s.fds = nil
}
