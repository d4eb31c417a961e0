package edgetest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// Bits of a channel's flags, and types of messages, in the protocol.
const (
	flagRead, flagWrite, flagQoS1, flagQoS2 = 1, 2, 4, 8

	msgCreate, msgDelete, msgStop = 0, 1, 2

	msgKeepalive, msgRuntimeLog, msgExited, msgOpen, msgClose, msgModuleLog, msgProfile = 0, 1, 2, 3, 4, 5, 6
)

// Profile is the profile that the module "upper" sends when it ends.
const Profile = "\xe1\x15\x1c\x00"

// module is a scripted module. argv[0], or the file's name, selects its behaviour:
//
//	hello        opens channel 0 on std/{uuid}, publishes "hello argc=2 [x] SLTEST=(unset)" and exits
//	stdio        does the same on $SL/proc/stdio, with the NUL that C peers add
//	upper        opens the channels of its data, and publishes in capitals what it reads; on "quit" sends a profile and exits with code 3
//	echo         opens its argument as channel 0, for reading and writing, and publishes what it reads
//	hear T       opens T as channel 0, for reading with QoS 2, and logs each message as "heard MESSAGE"
//	tell T TEXT  opens T for writing, as channel 0 with QoS 2 and as channel 1 with QoS 1, and publishes the text on both
//	exit N       exits immediately with code N and a status object
//	log TEXT     logs the text, then "level" with a level, and keeps running
//	channels N   opens N channels t/0, t/1, … and logs "opened"
//	closing T    opens channel 0 on T for reading and writing, publishes "before", closes it, publishes "after", and logs "closed"
//	wild T       opens T for reading and writing, then as channel 1 for reading, and logs "wild"
//	crash        ends the whole runtime program
//	badjson      exits with a status that is not JSON
//	badindex     sends open, publish, log and exit for a module 99 that does not exist, then logs "said"
//	badtype      sends a control message of an unknown type, then logs "said"
//	badchannel   publishes on a channel that is not open, then logs "said"
//	oversized    announces a frame of 4 GiB
//	truncated    sends half a frame and ends the program
//	stay         does nothing until it is deleted
type module struct {
	index  int
	uuid   string
	argv   []string
	data   moduleData
	host   host
	exited bool
}

// moduleData has the fields that public runtimes use.
type moduleData struct {
	Index    int             `json:"index"`
	UUID     string          `json:"uuid"`
	Filename string          `json:"filename"`
	Args     json.RawMessage `json:"args"`
	Env      []string        `json:"env"`
	Channels []struct {
		Mode  string `json:"mode"`
		Topic string `json:"topic"`
	} `json:"channels"`
}

// host connects a module to its manager by a socket (program), or to MQTT (foreignRuntime).
type host interface {
	control(m *module, msg int, payload []byte)
	publish(m *module, fd int, payload []byte)
	raw(frame []byte) // writes arbitrary bytes to the socket
	die()
}

func newModule(data []byte, h host) (*module, error) {
	m := &module{host: h}
	if err := json.Unmarshal(data, &m.data); err != nil {
		return nil, err
	}
	m.index, m.uuid = m.data.Index, m.data.UUID
	var object struct {
		Argv []string `json:"argv"`
	}
	if json.Unmarshal(m.data.Args, &m.argv) != nil && json.Unmarshal(m.data.Args, &object) == nil {
		m.argv = object.Argv
	}
	if len(m.argv) == 0 {
		base := m.data.Filename[strings.LastIndex(m.data.Filename, "/")+1:]
		m.argv = []string{strings.TrimSuffix(base, ".wasm")}
	}
	return m, nil
}

func (m *module) arg() string {
	if len(m.argv) > 1 {
		return m.argv[1]
	}
	return ""
}

func (m *module) open(fd, flags int, topic string) {
	m.host.control(m, msgOpen, append([]byte{byte(fd), byte(flags)}, topic...))
}
func (m *module) log(text string) { m.host.control(m, msgModuleLog, []byte(text)) }
func (m *module) exit(fields string) {
	m.exited = true
	m.host.control(m, msgExited, []byte(fields))
}

// start runs the module until it waits for messages.
func (m *module) start() {
	switch m.argv[0] {
	case "hello":
		m.hello("std/" + m.uuid)
	case "stdio":
		m.hello("$SL/proc/stdio\x00")
	case "upper":
		for fd, c := range m.data.Channels {
			m.open(fd, map[string]int{"r": flagRead, "w": flagWrite, "rw": flagRead | flagWrite}[c.Mode], c.Topic)
		}
		m.log("module started pid=" + strconv.Itoa(os.Getpid()))
	case "echo":
		m.open(0, flagRead|flagWrite, m.arg())
		m.log("open")
	case "hear":
		m.open(0, flagRead|flagQoS2, m.arg())
		m.log("open")
	case "tell":
		m.open(0, flagWrite|flagQoS2, m.arg())
		m.open(1, flagWrite|flagQoS1, m.arg())
		m.host.publish(m, 0, []byte(m.argv[2]))
		m.host.publish(m, 1, []byte(m.argv[2]))
	case "exit":
		m.exit(fmt.Sprintf(`{"status": {"code": %s, "reason": "exited", "message": ""}}`, m.arg()))
	case "log":
		m.log(m.arg())
		m.log("\x82level")
	case "channels":
		n, _ := strconv.Atoi(m.arg())
		for fd := range n {
			m.open(fd, flagRead|flagWrite, "t/"+strconv.Itoa(fd))
		}
		m.log("opened")
	case "closing":
		m.open(0, flagRead|flagWrite, m.arg())
		m.host.publish(m, 0, []byte("before"))
		m.host.control(m, msgClose, []byte{0})
		m.host.publish(m, 0, []byte("after"))
		m.log("closed")
	case "wild":
		m.open(0, flagRead|flagWrite, m.arg())
		m.host.publish(m, 0, []byte("to a wildcard"))
		m.open(1, flagRead, m.arg())
		m.log("wild")
	default:
		m.misbehave()
	}
}

func (m *module) hello(topic string) {
	env := "(unset)"
	for _, e := range m.data.Env {
		if value, ok := strings.CutPrefix(e, "SLTEST="); ok {
			env = value
		}
	}
	m.open(0, flagWrite, topic)
	m.host.publish(m, 0, fmt.Appendf(nil, "hello argc=%d [%s] SLTEST=%s\n", len(m.argv), m.arg(), env))
	m.exit(`{"status": "exited"}`)
}

func (m *module) misbehave() {
	ghost := &module{index: 99, host: m.host}
	switch m.argv[0] {
	case "crash":
		m.host.die()
	case "badjson":
		m.exit("{not json")
	case "badindex":
		ghost.open(0, flagRead, "t")
		m.host.publish(ghost, 0, []byte("x"))
		ghost.log("from nowhere")
		ghost.exit(`{"status": "exited"}`)
		m.log("said")
	case "badtype":
		m.host.control(m, 0x55, []byte("?"))
		m.log("said")
	case "badchannel":
		m.host.publish(m, 200, []byte("x"))
		m.log("said")
	case "oversized":
		m.host.raw([]byte{0xff, 0xff, 0xff, 0xff, 0x80, msgModuleLog})
	case "truncated":
		m.host.raw([]byte{9, 0, 0, 0, 0x80, msgModuleLog, 'h', 'a', 'l', 'f'})
		m.host.die()
	}
}

// receive handles a message on one of the module's channels.
func (m *module) receive(fd int, payload []byte) {
	switch m.argv[0] {
	case "echo":
		m.host.publish(m, fd, payload)
	case "hear":
		m.log("heard " + string(payload))
	case "upper":
		if string(payload) == "quit" {
			m.host.control(m, msgProfile, []byte(Profile))
			m.exit(`{"status": "exited", "exit_code": 3}`)
			return
		}
		// End the output with exactly one newline, even if the input comes from another "upper" module.
		out := append(bytes.TrimSuffix(bytes.ToUpper(payload), []byte("\n")), '\n')
		for to, c := range m.data.Channels {
			if strings.Contains(c.Mode, "w") {
				m.host.publish(m, to, out)
			}
		}
	}
}
