package edgetest

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"
)

// EnvScript is the environment variable that holds the Script of a runtime program, as JSON.
const EnvScript = "EDGETEST_RUNTIME"

// Script is the behaviour of a runtime program, apart from its modules.
type Script struct {
	Dir        string        `json:"dir"`         // of the sockets; /tmp/sl by default
	Silent     bool          `json:"silent"`      // never connects
	ExitEarly  bool          `json:"exit_early"`  // prints "cannot start" and exits with code 4 before connecting
	IgnoreStop bool          `json:"ignore_stop"` // ignores Stop messages
	NotReading bool          `json:"not_reading"` // connects and reads nothing
	Keepalive  time.Duration `json:"keepalive"`   // interval of keepalives; 0 means none
}

// Env returns environment variables for a program that calls Main. With these variables, the program becomes a runtime
// with this script.
func (s Script) Env() []string {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err) // encoding a Script cannot fail
	}
	return []string{EnvScript + "=" + string(b)}
}

// Call Main in TestMain. If the environment has a Script, the test binary becomes a runtime program, and Main does not
// return.
//
//	func TestMain(m *testing.M) { edgetest.Main(); os.Exit(m.Run()) }
func Main() {
	script, ok := os.LookupEnv(EnvScript)
	if !ok {
		return
	}
	os.Exit(Program(script, os.Args))
}

// Program runs an SLSocket runtime. The command line is `<command> <index>` with a decimal index, and the runtime
// connects to {dir}/{index:02x}.s. Program returns the exit status.
func Program(script string, argv []string) int {
	var s Script
	if script != "" {
		if err := json.Unmarshal([]byte(script), &s); err != nil {
			fmt.Fprintln(os.Stderr, "the script:", err)
			return 2
		}
	}
	if s.Dir == "" {
		s.Dir = "/tmp/sl"
	}
	index, err := strconv.Atoi(argv[len(argv)-1])
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "want an index:", err)
		return 2
	case s.ExitEarly:
		fmt.Fprintln(os.Stderr, "cannot start")
		return 4
	case s.Silent:
		time.Sleep(time.Hour)
	}
	conn, err := net.Dial("unix", filepath.Join(s.Dir, fmt.Sprintf("%02x.s", index)))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	p := &program{script: s, conn: conn, modules: map[int]*module{}}
	return p.run(argv)
}

// program is a running Program.
type program struct {
	script Script
	conn   net.Conn

	mu      sync.Mutex // guards modules and writes to conn
	modules map[int]*module
}

func (p *program) run(argv []string) int {
	fmt.Fprintf(os.Stderr, "runtime with %d arguments: %q\n", len(argv), argv[1:])
	go func() {
		// A runtime that reads its standard input must block; it must get neither EOF nor an error.
		_, err := os.Stdin.Read(make([]byte, 1))
		p.send(0x80, msgRuntimeLog, fmt.Appendf(nil, "stdin: %v", err))
	}()
	if p.script.NotReading {
		time.Sleep(time.Hour)
	}
	if p.script.Keepalive > 0 {
		go p.keepAlive()
	}
	for {
		head := make([]byte, 6)
		if _, err := io.ReadFull(p.conn, head); err != nil {
			return 0 // EOF: the manager has ended
		}
		payload := make([]byte, binary.LittleEndian.Uint32(head))
		if _, err := io.ReadFull(p.conn, payload); err != nil {
			return 1
		}
		if done := p.handle(head[4], head[5], payload); done {
			return 0
		}
	}
}

func (p *program) keepAlive() {
	for range time.Tick(p.script.Keepalive) {
		p.mu.Lock()
		children := []int{}
		for i := range p.modules {
			children = append(children, i)
		}
		p.mu.Unlock()
		slices.Sort(children)
		b, _ := json.Marshal(map[string]any{"apis": []string{"wasm", "wasi", "channels"}, "children": children})
		p.send(0x80, msgKeepalive, b)
	}
}

func (p *program) handle(h1, h2 byte, payload []byte) (done bool) {
	index := int(h1 & 0x7f)
	p.mu.Lock()
	m := p.modules[index]
	p.mu.Unlock()
	switch {
	case h1&0x80 == 0 && m != nil:
		m.receive(int(h2), payload)
	case h1&0x80 == 0:
		p.send(0x80, msgRuntimeLog, fmt.Appendf(nil, "a message for module %d, which is not there", index))
		return false
	case h2 == msgStop:
		return !p.script.IgnoreStop
	case h2 == msgDelete && m != nil:
		m.exit(`{"status": "killed"}`)
	case h2 == msgCreate:
		created, err := newModule(payload, p)
		if err != nil || created.index != index {
			p.send(0x80, msgRuntimeLog, fmt.Appendf(nil, "create on %d: %v", index, err))
			return false
		}
		m = created
		p.mu.Lock()
		p.modules[index] = m
		p.mu.Unlock()
		m.start()
	}
	if m != nil && m.exited {
		p.mu.Lock()
		delete(p.modules, index)
		p.mu.Unlock()
	}
	return false
}

func (p *program) send(h1, h2 byte, payload []byte) {
	frame := binary.LittleEndian.AppendUint32(nil, uint32(len(payload)))
	p.raw(append(append(frame, h1, h2), payload...))
}

func (p *program) control(m *module, msg int, payload []byte) {
	p.send(0x80|byte(m.index), byte(msg), payload)
}
func (p *program) publish(m *module, fd int, payload []byte) {
	p.send(byte(m.index), byte(fd), payload)
}

func (p *program) raw(frame []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, err := p.conn.Write(frame); err != nil {
		os.Exit(1)
	}
}

func (p *program) die() { os.Exit(70) }
