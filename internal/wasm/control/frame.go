package control

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

// Limits of a frame.
const (
	// MaxMessage is the longest message in bytes: descriptors, TLS material and environment of one pod fit easily.
	MaxMessage = 32 << 20
	// MaxFiles is how many file descriptors a frame carries; the kernel takes 253 at a time (SCM_MAX_FD).
	MaxFiles = 253

	headerSize = 8
)

var errFrame = errors.New("control protocol")

// frame is one message with its files.
type frame struct {
	payload []byte
	files   []*os.File
}

// close closes the files that nobody has taken over (set to nil).
func (f *frame) close() {
	closeFiles(f.files)
	f.files = nil
}

func closeFiles(files []*os.File) {
	for _, file := range files {
		if file != nil {
			file.Close()
		}
	}
}

// rights is a byte stream whose bytes may bring files along: *net.UnixConn, or a test.
type rights interface {
	ReadMsgUnix(b, oob []byte) (n, oobn, flags int, addr *net.UnixAddr, err error)
}

// frameReader cuts a stream into frames. Files arrive no later than the first byte of their frame, in order, so that
// each frame takes as many as its header says from those that have arrived.
type frameReader struct {
	conn rights
	buf  []byte // read and not yet used
	tmp  []byte
	oob  []byte
	fds  []int
}

func newFrameReader(conn rights) *frameReader {
	return &frameReader{conn: conn, tmp: make([]byte, 64<<10), oob: make([]byte, unix.CmsgSpace(4*MaxFiles))}
}

// next returns the next frame; io.EOF at an end between frames.
func (r *frameReader) next() (frame, error) {
	if err := r.fill(headerSize); err != nil {
		return frame{}, err
	}
	length, count := binary.BigEndian.Uint32(r.buf), binary.BigEndian.Uint32(r.buf[4:])
	if length > MaxMessage || count > MaxFiles {
		return frame{}, fmt.Errorf("%w: a frame of %d bytes and %d files; at most %d and %d are taken", errFrame, length, count, MaxMessage, MaxFiles)
	}
	if err := r.fill(headerSize + int(length)); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return frame{}, err
	}
	if int(count) > len(r.fds) {
		return frame{}, fmt.Errorf("%w: a frame says that it brings %d files and brings %d", errFrame, count, len(r.fds))
	}
	f := frame{payload: append([]byte(nil), r.buf[headerSize:headerSize+int(length)]...)}
	for _, fd := range r.fds[:count] {
		f.files = append(f.files, os.NewFile(uintptr(fd), "control"))
	}
	r.fds = append(r.fds[:0], r.fds[count:]...)
	r.buf = append(r.buf[:0], r.buf[headerSize+int(length):]...)
	return f, nil
}

// fill reads until n bytes are in the buffer. The buffer grows by what has come, not by what a header promises.
func (r *frameReader) fill(n int) error {
	for len(r.buf) < n {
		got, oobn, flags, _, err := r.conn.ReadMsgUnix(r.tmp, r.oob)
		if oobErr := r.take(r.oob[:oobn]); err == nil {
			err = oobErr
		}
		switch {
		case err != nil && !errors.Is(err, io.EOF):
			return err
		case flags&unix.MSG_CTRUNC != 0:
			return fmt.Errorf("%w: files were lost on the way (out of file descriptors?)", errFrame)
		case got == 0 && len(r.buf) == 0:
			return io.EOF
		case got == 0:
			return io.ErrUnexpectedEOF
		}
		r.buf = append(r.buf, r.tmp[:got]...)
	}
	return nil
}

// take keeps the descriptors of a control message.
func (r *frameReader) take(oob []byte) error {
	if len(oob) == 0 {
		return nil
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return fmt.Errorf("%w: %w", errFrame, err)
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			continue // credentials or timestamps: nothing that would have to be closed
		}
		r.fds = append(r.fds, fds...)
	}
	if len(r.fds) > 4*MaxFiles {
		return fmt.Errorf("%w: %d files that no frame claims", errFrame, len(r.fds))
	}
	return nil
}

// close closes what arrived and was never claimed.
func (r *frameReader) close() {
	for _, fd := range r.fds {
		unix.Close(fd)
	}
	r.fds = nil
}

// writeFrame sends payload and files; the files stay the caller's. Calls must not overlap.
func writeFrame(conn *net.UnixConn, payload []byte, files []*os.File) error {
	if len(payload) > MaxMessage || len(files) > MaxFiles {
		return fmt.Errorf("%w: a frame of %d bytes and %d files; at most %d and %d can be sent", errFrame, len(payload), len(files), MaxMessage, MaxFiles)
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
		raw, err := file.SyscallConn() // not Fd(): it would make the file blocking
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
