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

// An attach session has a socket pair of its own, whose one end travels with the request. Both ways go packets: a byte
// that says what it is, the length (uint32, big endian), the data. The socket's end is the end of the session, be it
// that the pod has ended or that the client is gone.
const (
	packetStdin    = 0 // to the worker; without data: end of file
	packetStdout   = 1
	packetStderr   = 2
	maxPacket      = 64 << 10
	packetOverhead = 5
)

// AttachIO is what a client attaches with; each may be nil. Stdin is not closed.
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

// Attach joins the pod's standard streams, from now on, and returns nil when the pod has ended, or when the worker has cut
// the session off because its output was not read. The error is that of ctx when it ends first, of a writer of rw, or
// tells why there is no session. A read of rw.Stdin that is under way then is left behind, until it ends.
func (c *Client) Attach(ctx context.Context, id string, rw AttachIO) error {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("attach: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "attach")
	conn, err := fileConn(os.NewFile(uintptr(fds[0]), "attach"))
	if err != nil {
		theirs.Close()
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

// receiveOutput copies until the end of the session, which comes between packets or, when it was cut, anywhere.
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

// AttachSession is a client's session as the worker sees it. Whoever has it must Close it.
type AttachSession struct {
	conn                  net.Conn
	in                    *bufio.Reader
	Stdin, Stdout, Stderr bool // what the client wants joined
}

// ReadStdin returns the client's next input; io.EOF at its end, and io.ErrUnexpectedEOF when the client is gone: it must be
// called also when Stdin is false, to learn of that.
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

// Write sends output; stderr says which stream it is of. It blocks while the client does not read, until Close.
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

// SetWriteDeadline bounds Writes, the one under way, too.
func (s *AttachSession) SetWriteDeadline(t time.Time) { _ = s.conn.SetWriteDeadline(t) }

// Close ends the session for the client, once what was written has been read.
func (s *AttachSession) Close() error { return s.conn.Close() }

func attach(ctx context.Context, h Handler, r *attachRequest) error {
	if r.Conn.File == nil {
		return fmt.Errorf("attach: no socket came along: %w", errdefs.ErrInvalidArgument)
	}
	conn, err := fileConn(r.Conn.File)
	if err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
	}
	session := &AttachSession{conn: conn, in: bufio.NewReaderSize(conn, 4<<10), Stdin: r.Stdin, Stdout: r.Stdout, Stderr: r.Stderr}
	if err := h.Attach(ctx, r.ID, session); err != nil {
		conn.Close()
		return err
	}
	return nil
}

// fileConn makes a connection of a socket, whose file is closed.
func fileConn(file *os.File) (net.Conn, error) {
	defer file.Close()
	conn, err := net.FileConn(file)
	if err != nil {
		return nil, fmt.Errorf("take the socket of a request: %w", err)
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
		return 0, nil, fmt.Errorf("%w: packet of %d bytes, at most %d are taken", fdpass.ErrFrame, n, maxPacket)
	}
	data = make([]byte, n)
	_, err = io.ReadFull(r, data)
	return header[0], data, err
}
