package fdpass

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// MaxFiles limits the descriptors of a frame. It is the kernel's own limit (SCM_MAX_FD).
const MaxFiles = 253

const headerSize = 8

// ErrFrame is the error for an invalid frame. If Write returns it, nothing was sent.
var ErrFrame = errors.New("invalid frame")

// Frame is a message with its files.
type Frame struct {
	Payload []byte
	Files   []*os.File
}

// Close closes the files that the caller has not taken. To take a file, the caller sets its element of Files to nil.
func (f *Frame) Close() {
	CloseFiles(f.Files)
	f.Files = nil
}

// CloseFiles closes the files that are not nil.
func CloseFiles(files []*os.File) {
	for _, file := range files {
		if file != nil {
			file.Close()
		}
	}
}

// Conn is a byte stream with files: a *net.UnixConn, or a fake in tests.
type Conn interface {
	ReadMsgUnix(b, oob []byte) (n, oobn, flags int, addr *net.UnixAddr, err error)
}

// Reader splits a stream into frames. Files arrive in order, and no later than the first byte of their frame. So each
// frame takes the oldest files that have arrived, as many as its header says.
type Reader struct {
	conn Conn
	max  int
	buf  []byte // read, not yet consumed
	tmp  []byte
	oob  []byte
	fds  []int
}

// NewReader makes a reader for messages of at most maxMessage bytes. The caller must Close it.
func NewReader(conn Conn, maxMessage int) *Reader {
	return &Reader{conn: conn, max: maxMessage, tmp: make([]byte, 64<<10), oob: make([]byte, unix.CmsgSpace(4*MaxFiles))}
}

// Next returns the next frame. It returns io.EOF if the stream ends between frames.
func (r *Reader) Next() (Frame, error) {
	if err := r.fill(headerSize); err != nil {
		return Frame{}, err
	}
	length, count := binary.BigEndian.Uint32(r.buf), binary.BigEndian.Uint32(r.buf[4:])
	if uint64(length) > uint64(r.max) || count > MaxFiles {
		return Frame{}, fmt.Errorf("%w: %d bytes and %d files exceed the limits of %d and %d", ErrFrame, length, count, r.max, MaxFiles)
	}
	if err := r.fill(headerSize + int(length)); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return Frame{}, err
	}
	if int(count) > len(r.fds) {
		return Frame{}, fmt.Errorf("%w: it announces %d files and has %d", ErrFrame, count, len(r.fds))
	}
	f := Frame{Payload: append([]byte(nil), r.buf[headerSize:headerSize+int(length)]...)}
	for _, fd := range r.fds[:count] {
		f.Files = append(f.Files, os.NewFile(uintptr(fd), "passed"))
	}
	r.fds = append(r.fds[:0], r.fds[count:]...)
	r.buf = append(r.buf[:0], r.buf[headerSize+int(length):]...)
	return f, nil
}

// fill reads until the buffer has n bytes. It allocates memory only as data arrives, whatever the header announces.
func (r *Reader) fill(n int) error {
	for len(r.buf) < n {
		got, oobn, flags, _, err := r.conn.ReadMsgUnix(r.tmp, r.oob)
		if oobErr := r.keepFiles(r.oob[:oobn]); err == nil {
			err = oobErr
		}
		switch {
		case err != nil && !errors.Is(err, io.EOF):
			return err
		case flags&unix.MSG_CTRUNC != 0:
			return fmt.Errorf("%w: files were lost in transit (out of file descriptors?)", ErrFrame)
		case got == 0 && len(r.buf) == 0:
			return io.EOF
		case got == 0:
			return io.ErrUnexpectedEOF
		}
		r.buf = append(r.buf, r.tmp[:got]...)
	}
	return nil
}

// keepFiles stores the descriptors of a control message until the next frames take them.
func (r *Reader) keepFiles(oob []byte) error {
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
		r.fds = append(r.fds, fds...)
	}
	if len(r.fds) > 4*MaxFiles {
		return fmt.Errorf("%w: %d files arrived without a frame", ErrFrame, len(r.fds))
	}
	return nil
}

// Close closes received files that belong to no frame yet. It does not close the connection.
func (r *Reader) Close() {
	for _, fd := range r.fds {
		unix.Close(fd)
	}
	r.fds = nil
}

// Write sends a frame with a payload of at most maxMessage bytes. It does not close the files. Calls for the same
// connection must not overlap.
func Write(conn *net.UnixConn, maxMessage int, payload []byte, files []*os.File) error {
	if len(payload) > maxMessage || len(files) > MaxFiles {
		return fmt.Errorf("%w: %d bytes and %d files exceed the limits of %d and %d", ErrFrame, len(payload), len(files), maxMessage, MaxFiles)
	}
	data := make([]byte, headerSize, headerSize+len(payload))
	binary.BigEndian.PutUint32(data, uint32(len(payload)))
	binary.BigEndian.PutUint32(data[4:], uint32(len(files)))
	data = append(data, payload...)
	if len(files) == 0 {
		_, err := conn.Write(data)
		return err
	}
	fds := make([]int, len(files))
	for i, file := range files {
		raw, err := file.SyscallConn() // Fd would make the file blocking
		if err != nil {
			return err
		}
		if err := raw.Control(func(fd uintptr) { fds[i] = int(fd) }); err != nil {
			return err
		}
	}
	n, _, err := conn.WriteMsgUnix(data, unix.UnixRights(fds...), nil)
	if err == nil && n < len(data) {
		_, err = conn.Write(data[n:])
	}
	for _, file := range files {
		runtime.KeepAlive(file)
	}
	return err
}
