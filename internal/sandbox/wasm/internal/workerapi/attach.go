package workerapi

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/fdpass"
)

// An attach session has its own socket pair. The client passes one end with the request. A packet consists of one byte
// for its kind, the length of the data (uint32, big endian), and the data. The session ends when the socket is closed,
// that is, when the pod exits or the client disconnects.
const (
	packetStdin    = 0 // to the worker; empty means end of file
	packetStdout   = 1
	packetStderr   = 2
	maxPacket      = 64 << 10
	packetOverhead = 5
)

// AttachIO are the client's streams of an attach session. Each can be nil. Attach does not close Stdin.
type AttachIO struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
}

type attachRequest struct {
	ID     string `json:"id"`
	Conn   File   `json:"conn"`
	Stdin  bool   `json:"stdin,omitempty"`
	Stdout bool   `json:"stdout,omitempty"`
	Stderr bool   `json:"stderr,omitempty"`
}

// Attach connects rw to the pod's standard streams, without earlier output. It returns nil when the pod exits, or when
// the worker disconnects a client that does not read. Otherwise it returns ctx's error, an error from a writer of rw,
// or the error that kept the session from starting. A read of rw.Stdin can still be pending after Attach has returned.
func (c *Client) Attach(ctx context.Context, id string, rw AttachIO) error {
	conn, theirs, err := socketPair("attach")
	if err != nil {
		return err
	}
	defer conn.Close()
	request := &attachRequest{ID: id, Conn: File{File: theirs}, Stdin: rw.Stdin != nil, Stdout: rw.Stdout != nil, Stderr: rw.Stderr != nil}
	err = c.call(ctx, opAttach, request, nil)
	theirs.Close()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	if rw.Stdin != nil {
		go sendStdin(conn, rw.Stdin)
	}
	if err := receiveOutput(conn, rw); ctx.Err() == nil {
		return err
	}
	return ctx.Err()
}

func sendStdin(conn net.Conn, stdin io.Reader) {
	buf := make([]byte, maxPacket)
	for {
		n, err := stdin.Read(buf)
		if n > 0 && writePacket(conn, packetStdin, buf[:n]) != nil {
			return
		}
		if err != nil {
			_ = writePacket(conn, packetStdin, nil)
			return
		}
	}
}

// receiveOutput copies output to rw until the session ends. Only an invalid packet or a writer's failure is an error.
// An incomplete packet is not an error, because the worker can disconnect the client at any time.
func receiveOutput(conn net.Conn, rw AttachIO) error {
	r := bufio.NewReaderSize(conn, maxPacket)
	for {
		kind, data, err := readPacket(r)
		if errors.Is(err, fdpass.ErrFrame) {
			return err
		}
		if err != nil {
			return nil
		}
		to := rw.Stdout
		if kind == packetStderr {
			to = rw.Stderr
		}
		if to == nil {
			continue
		}
		if _, err := to.Write(data); err != nil {
			return fmt.Errorf("attach: %w", err)
		}
	}
}

// AttachSession is the worker's side of an attach session. Its owner must Close it.
type AttachSession struct {
	conn                  net.Conn
	in                    *bufio.Reader
	Stdin, Stdout, Stderr bool // the streams that the client requested
}

// ReadStdin returns the client's next input, io.EOF at the end of the input, or io.ErrUnexpectedEOF when the client has
// disconnected. Call it even if Stdin is false, to notice the disconnection.
func (s *AttachSession) ReadStdin() ([]byte, error) {
	kind, data, err := readPacket(s.in)
	switch {
	case errors.Is(err, fdpass.ErrFrame):
		return nil, err
	case err != nil:
		return nil, io.ErrUnexpectedEOF
	case kind != packetStdin:
		return nil, fmt.Errorf("%w: packet of kind %d from an attached client", fdpass.ErrFrame, kind)
	case len(data) == 0:
		return nil, io.EOF
	}
	return data, nil
}

// Write sends output to the client, as stdout or stderr. It blocks until the client reads, or until Close or the write
// deadline.
func (s *AttachSession) Write(stderr bool, data []byte) error {
	kind := byte(packetStdout)
	if stderr {
		kind = packetStderr
	}
	for len(data) > 0 {
		n := min(len(data), maxPacket)
		if err := writePacket(s.conn, kind, data[:n]); err != nil {
			return err
		}
		data = data[n:]
	}
	return nil
}

// SetWriteDeadline sets the deadline for current and future Writes.
func (s *AttachSession) SetWriteDeadline(t time.Time) { _ = s.conn.SetWriteDeadline(t) }

// Close ends the session. The client can still read the output that was written.
func (s *AttachSession) Close() error { return s.conn.Close() }

func attach(ctx context.Context, h Handler, r *attachRequest) error {
	conn, err := passedConn(r.Conn)
	if err != nil {
		return err
	}
	session := &AttachSession{conn: conn, in: bufio.NewReaderSize(conn, 4<<10), Stdin: r.Stdin, Stdout: r.Stdout, Stderr: r.Stderr}
	if err := h.Attach(ctx, r.ID, session); err != nil {
		conn.Close()
		return err
	}
	return nil
}

// socketPair returns a connection, and its other end as a file to pass with a request.
func socketPair(name string) (net.Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", name, err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), name), os.NewFile(uintptr(fds[1]), name)
	defer ours.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		theirs.Close()
		return nil, nil, fmt.Errorf("%s: %w", name, err)
	}
	return conn, theirs, nil
}

// passedConn turns a socket that was passed with a request into a connection, and closes the file.
func passedConn(f File) (net.Conn, error) {
	if f.File == nil {
		return nil, fmt.Errorf("the request passed no socket: %w", errdefs.ErrInvalidArgument)
	}
	defer f.Close()
	conn, err := net.FileConn(f.File)
	if err != nil {
		return nil, fmt.Errorf("open the socket of a request: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	return conn, nil
}

func writePacket(w io.Writer, kind byte, data []byte) error {
	packet := make([]byte, packetOverhead, packetOverhead+len(data))
	packet[0] = kind
	binary.BigEndian.PutUint32(packet[1:], uint32(len(data)))
	_, err := w.Write(append(packet, data...))
	return err
}

func readPacket(r *bufio.Reader) (kind byte, data []byte, err error) {
	var header [packetOverhead]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(header[1:])
	if n > maxPacket {
		return 0, nil, fmt.Errorf("%w: packet of %d bytes; the limit is %d", fdpass.ErrFrame, n, maxPacket)
	}
	data = make([]byte, n)
	_, err = io.ReadFull(r, data)
	return header[0], data, err
}
