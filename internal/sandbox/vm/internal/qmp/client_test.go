package qmp_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/qmp"
)

const greeting = `{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "Debian"}, "capabilities": ["oob"]}}`

type request struct {
	Execute   string          `json:"execute"`
	Arguments json.RawMessage `json:"arguments"`
	ID        uint64          `json:"id"`
}

// serve acts as a monitor: it sends the greeting and passes each command to answer, which writes lines.
func serve(t *testing.T, answer func(r request, say func(format string, a ...any))) net.Conn {
	t.Helper()
	ours, theirs := net.Pipe()
	t.Cleanup(func() { ours.Close(); theirs.Close() })
	go func() {
		defer ours.Close()
		say := func(format string, a ...any) { fmt.Fprintf(ours, format+"\r\n", a...) }
		say("%s", greeting)
		for in := bufio.NewScanner(ours); in.Scan(); {
			var r request
			if err := json.Unmarshal(in.Bytes(), &r); err != nil {
				t.Errorf("the client sent %q: %v", in.Text(), err)
				return
			}
			if r.Execute == "qmp_capabilities" {
				say(`{"return": {}, "id": %d}`, r.ID)
				continue
			}
			if r.Execute == "end" {
				return
			}
			answer(r, say)
		}
	}()
	return theirs
}

func client(t *testing.T, conn net.Conn) *qmp.Client {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	c, err := qmp.NewClient(ctx, conn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// TestCommands: many concurrent callers get their own results and errors, in any order of the answers.
func TestCommands(t *testing.T) {
	var mu sync.Mutex
	var held *request
	c := client(t, serve(t, func(r request, say func(string, ...any)) {
		mu.Lock()
		defer mu.Unlock()
		switch r.Execute {
		case "echo":
			if held == nil { // answer it after the next command
				held = &r
				return
			}
			say(`{"return": %s, "id": %d}`, r.Arguments, r.ID)
			say(`{"return": %s, "id": %d}`, held.Arguments, held.ID)
			held = nil
		default:
			say(`{"error": {"class": "CommandNotFound", "desc": "The command %s has not been found"}, "id": %d}`, r.Execute, r.ID)
		}
	}))
	if v := c.Version().String(); v != "7.2.22" {
		t.Errorf("Version() = %s, want 7.2.22", v)
	}
	var calls sync.WaitGroup
	for i := range 20 {
		calls.Go(func() {
			var got struct{ N int }
			if err := c.Execute(t.Context(), "echo", map[string]int{"N": i}, &got); err != nil || got.N != i {
				t.Errorf("Execute(echo, N %d) returned N %d, error %v", i, got.N, err)
			}
		})
	}
	calls.Wait()
	err := c.Execute(t.Context(), "no-such", nil, nil)
	var refused *qmp.Error
	if !errors.As(err, &refused) || !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), "no-such: The command") {
		t.Errorf("Execute of an unknown command: got error %v, want an *Error with ErrNotFound", err)
	}
}

// TestExecuteFile: a command's file arrives with the command. A connection that cannot pass files says so and stays usable.
func TestExecuteFile(t *testing.T) {
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "qmp"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		conn, err := listener.AcceptUnix()
		if err != nil {
			return
		}
		defer conn.Close()
		fmt.Fprintln(conn, greeting)
		for line, oob := make([]byte, 4096), make([]byte, 64); ; {
			n, got, _, _, err := conn.ReadMsgUnix(line, oob)
			var r request
			if err != nil || json.Unmarshal(line[:n], &r) != nil {
				return
			}
			content := ""
			if messages, err := unix.ParseSocketControlMessage(oob[:got]); err == nil && len(messages) == 1 {
				fds, _ := unix.ParseUnixRights(&messages[0])
				file := os.NewFile(uintptr(fds[0]), "")
				raw, _ := io.ReadAll(file)
				file.Close()
				content = string(raw)
			}
			fmt.Fprintf(conn, `{"return": {"content": %q}, "id": %d}`+"\n", content, r.ID)
		}
	}()
	conn, err := net.DialUnix("unix", nil, listener.Addr().(*net.UnixAddr))
	if err != nil {
		t.Fatal(err)
	}
	c := client(t, conn)
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte("passed"), 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	var answer struct{ Content string }
	for want, passed := range map[string]*os.File{"passed": file, "": nil} {
		if err := c.ExecuteFile(t.Context(), "add-fd", nil, passed, &answer); err != nil || answer.Content != want {
			t.Errorf("ExecuteFile: got content %q, error %v; want %q", answer.Content, err, want)
		}
	}
	pipe := client(t, serve(t, func(r request, say func(string, ...any)) { say(`{"return": {}, "id": %d}`, r.ID) }))
	if err := pipe.ExecuteFile(t.Context(), "add-fd", nil, file, nil); !errdefs.IsNotImplemented(err) {
		t.Errorf("ExecuteFile over a pipe: got error %v, want ErrNotImplemented", err)
	}
}

// TestEventsNeverBlock: without a reader of events, answers still arrive, and dropped events are counted.
func TestEventsNeverBlock(t *testing.T) {
	c := client(t, serve(t, func(r request, say func(string, ...any)) {
		for range 1000 {
			say(`{"timestamp": {"seconds": 1700000000, "microseconds": 5}, "event": "RESET", "data": {"guest": true}}`)
		}
		say(`{"return": {}, "id": %d}`, r.ID)
	}))
	if err := c.Execute(t.Context(), "flood", nil, nil); err != nil {
		t.Fatal(err)
	}
	e := <-c.Events()
	if e.Name != "RESET" || string(e.Data) != `{"guest": true}` || !e.Time.Equal(time.Unix(1700000000, 5000)) {
		t.Errorf("first event = %+v, want RESET with its data and time", e)
	}
	if c.Lost() == 0 {
		t.Error("Lost() = 0 after 1000 events without a reader")
	}
	c.Close()
	n := 1
	for range c.Events() {
		n++
	}
	if got := uint64(n) + c.Lost(); got != 1000 {
		t.Errorf("received and lost events = %d, want 1000", got)
	}
}

// TestSilentMonitor (V1): a caller of a silent monitor returns at its deadline; other calls still work.
func TestSilentMonitor(t *testing.T) {
	c := client(t, serve(t, func(r request, say func(string, ...any)) {
		if r.Execute == "ping" {
			say(`{"return": {}, "id": 77777}`) // no call has this ID
			say(`{"return": {}, "id": %d}`, r.ID)
		}
	}))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := c.Execute(ctx, "sleep", nil, nil); !errdefs.IsUnavailable(err) {
		t.Errorf("Execute with a silent monitor: got error %v, want ErrUnavailable", err)
	}
	if err := c.Execute(t.Context(), "ping", nil, nil); err != nil {
		t.Errorf("Execute after the silence: %v", err)
	}
	if err := c.Execute(t.Context(), "end", nil, nil); !errdefs.IsUnavailable(err) {
		t.Errorf("Execute while the monitor ends: got error %v, want ErrUnavailable", err)
	}
	<-c.Done()
	if c.Err() == nil {
		t.Error("Err() = nil after Done")
	}
	if err := c.Execute(t.Context(), "ping", nil, nil); !errdefs.IsUnavailable(err) {
		t.Errorf("Execute after the end: got error %v, want ErrUnavailable", err)
	}
}

// TestFullPipe: a peer that does not read blocks a caller until its deadline; a partial command ends the connection.
func TestFullPipe(t *testing.T) {
	ours, theirs := net.Pipe()
	defer ours.Close()
	go func() {
		fmt.Fprintln(ours, greeting)
		in := bufio.NewReader(ours)
		_, _ = in.ReadString('\n')
		fmt.Fprintln(ours, `{"return": {}, "id": 1}`)
	}()
	c := client(t, theirs)
	for range 2 {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		if err := c.Execute(ctx, "ping", nil, nil); !errdefs.IsUnavailable(err) {
			t.Errorf("Execute without a reader: got error %v, want ErrUnavailable", err)
		}
		cancel()
	}
	go func() { _, _ = io.CopyN(io.Discard, ours, 5) }()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := c.Execute(ctx, "ping", nil, nil); !errdefs.IsUnavailable(err) {
		t.Errorf("Execute of a partly read command: got error %v, want ErrUnavailable", err)
	}
	<-c.Done()
}

// TestBadGreetings: NewClient refuses a peer that is silent or not a monitor.
func TestBadGreetings(t *testing.T) {
	for name, c := range map[string]struct {
		line string
		is   func(error) bool
	}{
		"silence":    {"", errdefs.IsUnavailable},
		"no JSON":    {"SSH-2.0-OpenSSH_9.2\n", errdefs.IsDataLoss},
		"no QMP":     {`{"return": {}}` + "\n", errdefs.IsDataLoss},
		"too long":   {`{"QMP": "` + strings.Repeat("x", qmp.MaxLine) + `"}` + "\n", errdefs.IsDataLoss},
		"truncated":  {`{"QMP": `, errdefs.IsUnavailable},
		"other type": {`{"QMP": 7}` + "\n", errdefs.IsDataLoss},
	} {
		t.Run(name, func(t *testing.T) {
			ours, theirs := net.Pipe()
			go func() {
				_, _ = io.WriteString(ours, c.line)
				if name == "truncated" {
					ours.Close()
				}
			}()
			defer ours.Close()
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			if _, err := qmp.NewClient(ctx, theirs); !c.is(err) {
				t.Errorf("NewClient: got error %v, want another class", err)
			}
		})
	}
}

// FuzzReader: no input makes the client panic or hang.
func FuzzReader(f *testing.F) {
	f.Add([]byte(greeting + "\r\n" + `{"return": {}, "id": 1}` + "\n" + `{"event": "STOP", "timestamp": {"seconds": -1}}` + "\n" +
		`{"return": [], "id": 2}`))
	f.Add([]byte(greeting + "\n" + `{"error": {"class": "GenericError", "desc": ""}, "id": 1}`))
	f.Add([]byte("{}\n\n\r\n{\"QMP\":null}"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		ours, theirs := net.Pipe()
		go func() { _, _ = io.Copy(io.Discard, ours) }()
		go func() {
			_, _ = ours.Write(raw)
			ours.Close()
		}()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		c, err := qmp.NewClient(ctx, theirs)
		if err != nil {
			return
		}
		var result any
		_ = c.Execute(ctx, "query-status", nil, &result)
		<-c.Done()
		for e := range c.Events() {
			if e.Name == "" {
				t.Error("an event without a name")
			}
		}
	})
}
