package workerapi

import (
	"encoding/json"
	"log/slog"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/fdpass"
)

// FuzzRequests checks that no request makes the server panic, return an error without a class, or leak a file.
func FuzzRequests(f *testing.F) {
	for _, s := range []struct{ op, body string }{
		{opHello, `{"version":1,"events":true}`},
		{opLoad, `{"digest":"d","image":{"fd":0}}`},
		{opStart, `{"id":"x","log":{"fd":1},"mounts":[{"dir":{"fd":0}}],"ports":[{"socket":{"fd":0}}]}`},
		{opStart, `{"log":{"fd":-1}}`}, {opStart, `{"limits":{"requestTimeout":1e99}}`},
		{opDialer, `{"id":"x","file":{"fd":0}}`}, {opStart, `{"id":"x","egress":{"dialer":{"fd":1},"roots":{"fd":0}}}`},
		{opReopenLog, `{"id":"x","file":{"fd":0}}`}, {opAttach, `{"id":"x","conn":{"fd":0}}`},
		{opChannels, `{"id":"x","conn":{"fd":0}}`}, {opUpdate, `null`}, {opList, ``}, {"?", `[]`},
	} {
		f.Add(s.op, []byte(s.body), uint8(2))
	}
	h := newHandler()
	h.release = nil
	server := NewServer(nil, h, slog.New(slog.DiscardHandler))
	server.cancel() // so that Stop does not block
	f.Fuzz(func(t *testing.T, op string, body []byte, files uint8) {
		h.specs, h.contents = nil, nil
		c := &serverConn{server: server}
		var request fdpass.Frame
		var fds []int
		for range files % 4 {
			file, err := os.Open("/dev/null")
			if err != nil {
				t.Fatal(err)
			}
			raw, _ := file.SyscallConn()
			_ = raw.Control(func(fd uintptr) { fds = append(fds, int(fd)) })
			request.Files = append(request.Files, file)
		}
		reply, err := c.dispatch(message{ID: 1, Op: op, Body: body}, &request)
		request.Close()
		if op == opStop {
			for len(h.blocked) > 0 {
				<-h.blocked
			}
		}
		if err == nil {
			if _, err := json.Marshal(reply); err != nil {
				t.Fatal(err)
			}
		} else if fdpass.ToWire(err).Class == "" {
			t.Fatalf("%s %s: error %q has no class", op, body, err)
		}
		for _, fd := range fds {
			if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil {
				t.Fatalf("%s %s: file %d is still open", op, body, fd)
			}
		}
	})
}
