package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// transferred is the number of bytes that a test of N13 sends each way; through a guest's serial port, which is slower,
// it is guestTransferred.
const transferred, guestTransferred = 100 << 20, 6 << 20

// gate passes bytes until it has passed limit of them. It then waits until open is closed.
type gate struct {
	from    io.Reader
	limit   int
	reached chan struct{} // closed at the limit
	open    chan struct{}
}

func newGate(from io.Reader, limit int) *gate {
	return &gate{from: from, limit: limit, reached: make(chan struct{}), open: make(chan struct{})}
}

func (g *gate) Read(p []byte) (int, error) {
	if g.limit == 0 {
		close(g.reached)
		<-g.open
		g.limit = -1
	}
	if g.limit > 0 {
		p = p[:min(len(p), g.limit)]
	}
	n, err := g.from.Read(p)
	if g.limit > 0 {
		g.limit -= n
	}
	return n, err
}

// transfer sends random bytes and receives them again. It stops in the middle, twice.
type transfer struct {
	gates     [2]*gate
	sent, got [sha256.Size]byte
	err       error
	done      chan struct{}
}

// run starts the transfer: a function that sends what it reads and returns what it receives.
func (tr *transfer) run(size int, carry func(in io.Reader, out io.Writer) error) {
	source := io.LimitReader(rand.NewChaCha8([32]byte{13}), int64(size))
	sent, got := sha256.New(), sha256.New()
	tr.gates[0] = newGate(io.TeeReader(source, sent), size/3)
	tr.gates[1] = newGate(tr.gates[0], 2*size/3)
	tr.done = make(chan struct{})
	go func() {
		defer close(tr.done)
		tr.err = carry(tr.gates[1], got)
		sent.Sum(tr.sent[:0])
		got.Sum(tr.got[:0])
	}()
}

func (tr *transfer) wait(t *testing.T) {
	t.Helper()
	select {
	case <-tr.done:
	case <-time.After(2 * time.Minute):
		t.Fatal("the transfer did not end within 2 minutes")
	}
	if tr.err != nil || tr.got != tr.sent {
		t.Errorf("transfer: got error %v, checksum %x; want %x", tr.err, tr.got, tr.sent)
	}
}

// execTransfer transfers through `cat` in a container.
func execTransfer(t *testing.T, p harness.Protocol, c *harness.Container, d *harness.Daemon, size int) *transfer {
	url, tr := execURL(t, d, c, false, "cat"), &transfer{}
	tr.run(size, func(in io.Reader, out io.Writer) error {
		code, err := harness.Stream(context.Background(), p, url, remotecommand.StreamOptions{Stdin: in, Stdout: out, Stderr: io.Discard})
		if err == nil && code != 0 {
			err = fmt.Errorf("exit code %d", code)
		}
		return err
	})
	return tr
}

// forwardTransfer transfers through an echo server, over a forwarded port.
func forwardTransfer(t *testing.T, address string, size int) *transfer {
	conn := dialForwarded(t, address)
	tr := &transfer{}
	tr.run(size, func(in io.Reader, out io.Writer) error {
		go func() {
			_, _ = io.Copy(conn, in)
			_ = conn.CloseWrite()
		}()
		_, err := io.Copy(out, conn)
		return err
	})
	return tr
}

func dialForwarded(t *testing.T, address string) *net.TCPConn {
	t.Helper()
	conn, err := net.DialTimeout("tcp", address, waitLimit)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn.(*net.TCPConn)
}

// wantEcho checks that a new connection to a forwarded echo server works.
func wantEcho(t *testing.T, address string) {
	t.Helper()
	conn := dialForwarded(t, address)
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(waitLimit))
	if _, err := conn.Write([]byte("hello")); err != nil {
		t.Error(err)
	}
	got := make([]byte, 5)
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != "hello" {
		t.Errorf("echo over the forwarded port: got %q, error %v; want hello", got, err)
	}
}

// counted checks that the lines of a session's output are consecutive numbers, and returns the last one.
func counted(t *testing.T, output string) int {
	t.Helper()
	lines := strings.Split(output[:strings.LastIndexByte(output, '\n')+1], "\n")
	first, last := -1, -1
	for _, line := range lines[:len(lines)-1] {
		n, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil || last >= 0 && n != last+1 {
			t.Fatalf("line after %d: got %q, want the next number", last, line)
		}
		if first < 0 {
			first = n
		}
		last = n
	}
	return last
}

// TestFaultN13SessionsOutliveTheDaemon: sessions of all kinds do not notice that the daemon is killed, started, and
// restarted: no byte is lost or doubled, the terminal's size follows the client's, exit codes arrive.
func TestFaultN13SessionsOutliveTheDaemon(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	p := startPod(t, d)
	shell := p.Run(harness.ContainerConfig("shell", harness.Busybox, harness.Shell("exec nc -ll -p 8080 -e cat")))
	shell.Must("sh", "-c", "until netstat -ltn | grep -q :8080; do usleep 20000; done")
	counter := p.Run(harness.ContainerConfig("counter", harness.Busybox,
		harness.Shell("i=0; while usleep 1000; do echo $i; i=$((i+1)); done")))
	component, service := startComponent(t, d, harness.FaultsC, faults)

	var transfers []*transfer
	for _, protocol := range harness.HalfClosing {
		transfers = append(transfers, execTransfer(t, protocol, shell, d, transferred))
	}
	var terminals, counters []*session
	for _, protocol := range harness.Protocols {
		s := startSession(t, protocol, execURL(t, d, shell, true, "sh"), true)
		s.sizes <- &remotecommand.TerminalSize{Width: 81, Height: 41}
		s.send("PS1=; stty -echo; until [ \"$(stty size)\" = '41 81' ]; do usleep 10000; done; echo size-$((40+1))\n")
		s.stdout.wait(t, "size-41")
		terminals = append(terminals, s)
		counters = append(counters, startSession(t, protocol, counter.AttachURL(true, false), false))
	}
	attached := startSession(t, harness.SPDY, component.AttachURL(true, false), false)
	hears := func(word string) {
		t.Helper()
		harness.Eventually(t, waitLimit, func() error {
			select {
			case <-attached.done:
				t.Fatalf("the session with the component has ended: %v", attached.err)
			default:
			}
			service.call(faults+"/Print", `{"stdout":"`+word+`\n"}`)
			if got := attached.stdout.String(); !strings.Contains(got, word) {
				return fmt.Errorf("output of the component: got %q, want %q", got, word)
			}
			return nil
		})
	}
	hears("before")
	forwarded := p.Forward(t, 8080)
	transfers = append(transfers, forwardTransfer(t, forwarded, transferred))
	carrier := d.Carrier()

	// progress checks that all sessions go on.
	progress := func(step int) {
		t.Helper()
		for i, s := range terminals {
			s.sizes <- &remotecommand.TerminalSize{Width: 100, Height: uint16(50 + step)}
			s.send(fmt.Sprintf("until [ \"$(stty size)\" = '%d 100' ]; do usleep 10000; done; echo size-$((%d+%d))\n", 50+step, 50, step))
			s.stdout.wait(t, fmt.Sprintf("size-%d", 50+step))
			before := counted(t, counters[i].stdout.String())
			harness.Eventually(t, waitLimit, func() error {
				if now := counted(t, counters[i].stdout.String()); now < before+100 {
					return fmt.Errorf("last line: got %d, want at least %d", now, before+100)
				}
				return nil
			})
		}
		hears(fmt.Sprintf("step-%d", step))
		wantEcho(t, forwarded)
	}
	pass := func(i int) {
		for _, tr := range transfers {
			select {
			case <-tr.gates[i].reached:
			case <-time.After(2 * waitLimit):
				t.Fatalf("a transfer does not go on, before stop %d", i+1)
			}
		}
	}
	pass(0)
	early := execURL(t, d, shell, false, "sh", "-c", "echo early; exit 3")
	d.Kill()
	progress(1)
	s := startSession(t, harness.SPDY, early, false) // its URL outlives the daemon too
	s.stdout.wait(t, "early")
	s.wait(3)
	for _, tr := range transfers {
		close(tr.gates[0].open)
	}
	pass(1)
	d.Start()
	progress(2)
	d.Restart()
	progress(3)
	for _, tr := range transfers {
		close(tr.gates[1].open)
	}
	for _, tr := range transfers {
		tr.wait(t)
	}
	for _, s := range terminals {
		s.send("exit 7\n")
		s.wait(7)
	}
	if now := d.Carrier(); now != carrier {
		t.Errorf("session carrier: got process %d, want %d, because the build is the same", now, carrier)
	}
	counter.Stop(0)
	for _, s := range counters {
		s.wait(0)
	}
}

// TestFaultN13CarrierIsKilled: if the process that carries the sessions is killed, they end, their programs are killed,
// unused URLs stay valid, and later sessions work. If clients vanish while the daemon is away, their programs are killed
// as well.
func TestFaultN13CarrierIsKilled(t *testing.T) {
	d := harness.StartDaemon(t)
	c := startPod(t, d).Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
	programs := func(want int) {
		t.Helper()
		harness.Eventually(t, waitLimit, func() error {
			out, err := d.CRI().ExecSync(t.Context(),
				&runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"sh", "-c", "ps -o args | grep -c '^sleep 4711'; true"}})
			if err != nil {
				return err
			}
			if got := strings.TrimSpace(string(out.GetStdout())); got != strconv.Itoa(want) {
				return fmt.Errorf("programs in the container: got %s, want %d", got, want)
			}
			return nil
		})
	}
	var sessions []*session
	for _, protocol := range harness.Protocols {
		s := startSession(t, protocol, execURL(t, d, c, protocol == harness.SPDY, "sh", "-c", "echo up; exec sleep 4711"),
			protocol == harness.SPDY)
		s.stdout.wait(t, "up")
		sessions = append(sessions, s)
	}
	programs(len(sessions))
	unused := execURL(t, d, c, false, "echo", "still")
	killed := d.Carrier()
	if err := syscall.Kill(killed, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for i, s := range sessions {
		<-s.done
		if harness.Protocols[i] == harness.WebSocket && s.err == nil { // an SPDY client takes a closed connection for success
			t.Error("a session whose carrier was killed ended without an error")
		}
	}
	programs(0)
	s := startSession(t, harness.SPDY, unused, false)
	s.stdout.wait(t, "still")
	s.wait(0)
	if now := d.Carrier(); now == killed {
		t.Error("the killed carrier is still there")
	}

	vanishing := startSession(t, harness.WebSocket, execURL(t, d, c, false, "sh", "-c", "echo up; exec sleep 4711"), false)
	vanishing.stdout.wait(t, "up")
	programs(1)
	d.Kill()
	vanishing.end()
	<-vanishing.done
	d.Start()
	programs(0)

	// Both are killed: the next daemon finds the programs.
	orphan := startSession(t, harness.SPDY, execURL(t, d, c, false, "sh", "-c", "echo up; exec sleep 4711"), false)
	orphan.stdout.wait(t, "up")
	d.Kill()
	if err := syscall.Kill(d.Carrier(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-orphan.done
	d.Start()
	programs(0)
	if got := c.Exec(harness.SPDY, bytes.NewReader([]byte("again")), false, "cat"); got.Stdout != "again" {
		t.Errorf("exec afterwards: got %+v, want the output %q", got, "again")
	}
}

// TestFaultN13SessionsWithAMachine: sessions with a machine outlive the daemon too: its agent's and its console's.
func TestFaultN13SessionsWithAMachine(t *testing.T) {
	d := harness.StartDaemon(t, harness.VM(t))
	c := d.RunVM(t, &harness.PodSpec{Image: harness.Guest, Container: []harness.ContainerOption{terminal}})
	c.WaitGuest()
	waitAgent(t, d, c)
	serial := startSession(t, harness.SPDY, c.AttachURL(true, true), true)
	shell := startSession(t, harness.WebSocketV5, execURL(t, d, c, true, "sh"), true)
	tr := execTransfer(t, harness.SPDY, c, d, guestTransferred)
	forwarded := c.Pod.Forward(t, 80)
	carrier := d.Carrier()
	progress := func(step int) {
		t.Helper()
		shell.sizes <- &remotecommand.TerminalSize{Width: 100, Height: uint16(50 + step)}
		shell.send(fmt.Sprintf("until [ \"$(stty size)\" = '%d 100' ]; do sleep 0.1; done; echo size-$((50+%d))\n", 50+step, step))
		shell.stdout.wait(t, fmt.Sprintf("size-%d", 50+step))
		serial.send(fmt.Sprintf("echo serial-$((%d+%d))\n", 70, step))
		serial.stdout.wait(t, fmt.Sprintf("serial-%d", 70+step))
		if page := get(t, "http://"+forwarded); !strings.Contains(page, "hello from") {
			t.Errorf("page of the guest: got %q, want hello", page)
		}
	}
	progress(0)
	<-tr.gates[0].reached
	d.Kill()
	progress(1)
	close(tr.gates[0].open)
	<-tr.gates[1].reached
	d.Start()
	progress(2)
	if got := c.Must("echo", "beside"); got != "beside\n" { // the daemon's own port
		t.Errorf("ExecSync beside sessions: got %q", got)
	}
	close(tr.gates[1].open)
	tr.wait(t)
	shell.send("exit 7\n")
	shell.wait(7)
	if now := d.Carrier(); now != carrier {
		t.Errorf("session carrier: got process %d, want %d", now, carrier)
	}
	c.Stop(0)
	serial.wait(0) // the end of the machine is the end of the session
}
