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

// Reader splits a stream into frames. Files arrive in order, and no later than the first byte of their frame. So each
// frame takes the oldest files that have arrived, as many as its header says.
type Reader struct {
	stream *Stream
	max    int
	buf    []byte // read, not yet consumed
	tmp    []byte
}

// NewReader makes a reader for messages of at most maxMessage bytes. The caller must Close it.
func NewReader(conn Conn, maxMessage int) *Reader {
	return &Reader{stream: NewStream(conn), max: maxMessage, tmp: make([]byte, 64<<10)}
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
	if int(count) > len(r.stream.fds) {
		return Frame{}, fmt.Errorf("%w: it announces %d files and has %d", ErrFrame, count, len(r.stream.fds))
	}
	f := Frame{Payload: append([]byte(nil), r.buf[headerSize:headerSize+int(length)]...)}
	for _, fd := range r.stream.fds[:count] {
		f.Files = append(f.Files, os.NewFile(uintptr(fd), "passed"))
	}
	r.stream.fds = append(r.stream.fds[:0], r.stream.fds[count:]...)
	r.buf = append(r.buf[:0], r.buf[headerSize+int(length):]...)
	return f, nil
}

// fill reads until the buffer has n bytes. It allocates memory only as data arrives, whatever the header announces.
func (r *Reader) fill(n int) error {
	for len(r.buf) < n {
		got, err := r.stream.Read(r.tmp)
		switch {
		case errors.Is(err, io.EOF) && len(r.buf) > 0:
			return io.ErrUnexpectedEOF
		case err != nil:
			return err
		}
		r.buf = append(r.buf, r.tmp[:got]...)
	}
	return nil
}

// Close closes received files that belong to no frame yet. It does not close the connection.
func (r *Reader) Close() { r.stream.Close() }

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
