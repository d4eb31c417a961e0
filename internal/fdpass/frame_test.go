package fdpass

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// wire is a scripted connection: the fuzzer chooses the length of each piece and the number of files that come with it.
type wire struct {
	data []byte
	cuts []byte // for each piece, its length and its number of files
	made []int  // descriptors passed to the reader
}

func (w *wire) ReadMsgUnix(b, oob []byte) (n, oobn, flags int, addr *net.UnixAddr, err error) {
	if len(w.data) == 0 {
		return 0, 0, 0, nil, io.EOF
	}
	length, files := len(w.data), 0
	if len(w.cuts) > 1 {
		length, files = min(1+int(w.cuts[0]), length), int(w.cuts[1])%4
		w.cuts = w.cuts[2:]
	}
	n = copy(b, w.data[:length])
	w.data = w.data[n:]
	var fds []int
	for range files {
		fd, err := unix.Open("/dev/null", unix.O_CLOEXEC|unix.O_RDONLY, 0)
		if err != nil {
			return 0, 0, 0, nil, err
		}
		fds = append(fds, fd)
	}
	w.made = append(w.made, fds...)
	if len(fds) > 0 {
		oobn = copy(oob, unix.UnixRights(fds...))
	}
	return n, oobn, 0, nil, nil
}

func header(length, files uint32) []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, length), files)
}

// FuzzFrames checks that frames have the length and the files that their headers announce, and that all files are
// closed in the end.
func FuzzFrames(f *testing.F) {
	f.Add(append(header(2, 0), "{}"...), []byte{})
	f.Add(append(header(2, 1), "{}"...), []byte{3, 0, 200, 1})
	f.Add(append(header(2, 1), "{}"...), []byte{3, 1, 0, 2, 0, 3})
	f.Add(header(1<<31, 2), []byte{})
	f.Add(append(append(header(0, 0), header(1, 0)...), 'x'), []byte{11, 0})
	f.Fuzz(func(t *testing.T, data, cuts []byte) {
		w := &wire{data: bytes.Clone(data), cuts: cuts}
		r := NewReader(w, 1<<20)
		closed := map[uintptr]bool{}
		rest := data
		for {
			frame, err := r.Next()
			if err != nil {
				break
			}
			length, count := binary.BigEndian.Uint32(rest), binary.BigEndian.Uint32(rest[4:])
			if len(frame.Payload) != int(length) || len(frame.Files) != int(count) ||
				!bytes.Equal(frame.Payload, rest[headerSize:headerSize+length]) {
				t.Fatalf("frame has %d bytes and %d files, want the %d and %d of its header", len(frame.Payload), len(frame.Files), length, count)
			}
			rest = rest[headerSize+length:]
			for _, file := range frame.Files {
				closed[file.Fd()] = true
			}
			frame.Close()
		}
		r.Close()
		for _, fd := range w.made {
			if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil {
				unix.Close(fd)
				t.Errorf("descriptor %d is still open after Close", fd)
			}
		}
	})
}

// socketpair returns the two ends of a connection.
func socketpair() (conns [2]*net.UnixConn, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return conns, err
	}
	for i, fd := range fds {
		file := os.NewFile(uintptr(fd), "socketpair")
		conn, err := net.FileConn(file)
		file.Close()
		if err != nil {
			return conns, err
		}
		conns[i] = conn.(*net.UnixConn)
	}
	return conns, nil
}
