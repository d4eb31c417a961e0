package control

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// wire is a connection from a script: the stream is cut where the fuzzer says, and each piece brings so many files.
type wire struct {
	data []byte
	cuts []byte // length and number of files of each piece, in turn
	made []int  // descriptors that were handed over
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

// FuzzFrames: whatever comes, frames are as long as their header says, no file is lost or closed twice, and what comes
// after an error is nothing.
func FuzzFrames(f *testing.F) {
	f.Add(append(header(2, 0), "{}"...), []byte{})
	f.Add(append(header(2, 1), "{}"...), []byte{3, 0, 200, 1})
	f.Add(append(header(2, 1), "{}"...), []byte{3, 1, 0, 2, 0, 3})
	f.Add(header(1<<31, 2), []byte{})
	f.Add(append(append(header(0, 0), header(1, 0)...), 'x'), []byte{11, 0})
	f.Fuzz(func(t *testing.T, data, cuts []byte) {
		w := &wire{data: bytes.Clone(data), cuts: cuts}
		r := newFrameReader(w)
		closed := map[uintptr]bool{}
		rest := data
		for {
			frame, err := r.next()
			if err != nil {
				break
			}
			length, count := binary.BigEndian.Uint32(rest), binary.BigEndian.Uint32(rest[4:])
			if len(frame.payload) != int(length) || len(frame.files) != int(count) || !bytes.Equal(frame.payload, rest[headerSize:headerSize+length]) {
				t.Fatalf("header says %d bytes and %d files, frame has %d and %d", length, count, len(frame.payload), len(frame.files))
			}
			rest = rest[headerSize+length:]
			for _, file := range frame.files {
				closed[file.Fd()] = true
			}
			frame.close()
		}
		r.close()
		for _, fd := range w.made {
			if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil {
				unix.Close(fd)
				t.Errorf("file %d is still open", fd)
			}
		}
	})
}

// FuzzRequests: no request makes the server panic, answer without a class, or keep a file.
func FuzzRequests(f *testing.F) {
	for _, s := range []struct{ op, body string }{
		{opHello, `{"version":1,"events":true}`},
		{opLoad, `{"digest":"d","image":{"fd":0}}`},
		{opStart, `{"id":"x","log":{"fd":1},"mounts":[{"dir":{"fd":0}}],"ports":[{"socket":{"fd":0}}]}`},
		{opStart, `{"log":{"fd":-1}}`}, {opStart, `{"limits":{"requestTimeout":1e99}}`},
		{opReopenLog, `{"id":"x","file":{"fd":0}}`}, {opAttach, `{"id":"x","conn":{"fd":0}}`},
		{opUpdate, `null`}, {opList, ``}, {"?", `[]`},
	} {
		f.Add(s.op, []byte(s.body), uint8(2))
	}
	h := newHandler()
	h.release = nil
	server := NewServer(nil, h, slog.New(slog.DiscardHandler))
	server.cancel() // Stop returns
	f.Fuzz(func(t *testing.T, op string, body []byte, files uint8) {
		h.specs, h.contents = nil, nil
		c := &serverConn{server: server}
		var request frame
		var fds []int
		for range files % 4 {
			file, err := os.Open("/dev/null")
			if err != nil {
				t.Fatal(err)
			}
			raw, _ := file.SyscallConn()
			_ = raw.Control(func(fd uintptr) { fds = append(fds, int(fd)) })
			request.files = append(request.files, file)
		}
		reply, err := c.dispatch(message{ID: 1, Op: op, Body: body}, &request)
		request.close()
		if op == opStop {
			for len(h.blocked) > 0 {
				<-h.blocked
			}
		}
		if err == nil {
			if _, err := json.Marshal(reply); err != nil {
				t.Fatal(err)
			}
		} else if toWire(err).Class == "" {
			t.Fatalf("%s %s: %v has no class", op, body, err)
		}
		for _, fd := range fds {
			if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil {
				t.Fatalf("%s %s: file %d is still open", op, body, fd)
			}
		}
	})
}
