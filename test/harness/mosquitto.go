package harness

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// Mosquitto is Debian's MQTT broker with a directory for its data.
type Mosquitto struct {
	process
	Address string
}

// StartMosquitto starts a broker at the address. Create the daemon first. Then the broker ends before the daemon's leak
// check, which would report a running broker.
func StartMosquitto(t testing.TB, address string) *Mosquitto {
	t.Helper()
	dir := t.TempDir()
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	conf := filepath.Join(dir, "mosquitto.conf")
	text := fmt.Sprintf("listener %s %s\nallow_anonymous true\nuser root\npersistence true\npersistence_location %s/\nautosave_interval 1\nautosave_on_changes true\n", port, host, dir)
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	m := &Mosquitto{process: process{t: t, args: []string{"/usr/sbin/mosquitto", "-c", conf}, log: filepath.Join(dir, "log")},
		Address: address}
	m.Start()
	t.Cleanup(m.cleanUp)
	return m
}

// Start starts the broker. It can be called again after Kill.
func (m *Mosquitto) Start() {
	m.t.Helper()
	m.start(func() error { return Listens(m.Address) })
}

// Kill kills the broker with SIGKILL.
func (m *Mosquitto) Kill() { m.t.Helper(); m.end(syscall.SIGKILL) }

// Message is a message that mosquitto_sub printed.
type Message struct {
	Topic, QoS, Payload string
}

// Subscriber is a mosquitto_sub, a client independent of Tripod.
type Subscriber struct {
	process
	mu       sync.Mutex
	messages []Message
}

// Subscribe starts a mosquitto_sub with QoS 2 and waits until it has subscribed.
func Subscribe(t testing.TB, address string, filters ...string) *Subscriber {
	t.Helper()
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	ready := fmt.Sprintf("harness/ready/%d", daemons.Add(1))
	args := []string{"/usr/bin/mosquitto_sub", "-h", host, "-p", port, "-V", "5", "-q", "2", "-F", "%q %t %x", "-t", ready}
	for _, f := range filters {
		args = append(args, "-t", f)
	}
	s := &Subscriber{process: process{t: t, args: args}}
	cmd := exec.Command(args[0], args[1:]...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s.cmd, s.done = cmd, make(chan struct{})
	go s.read(cmd, out)
	t.Cleanup(func() { s.end(syscall.SIGKILL) })
	Eventually(t, edgeTimeout, func() error {
		if err := Publish(address, ready, 0, "ready"); err != nil {
			return err
		}
		if !s.received(func(m Message) bool { return m.Topic == ready }) {
			return fmt.Errorf("mosquitto_sub has not subscribed")
		}
		return nil
	})
	return s
}

func (s *Subscriber) read(cmd *exec.Cmd, out io.Reader) {
	defer close(s.done)
	scanner := bufio.NewScanner(out)
	scanner.Buffer(nil, 64<<20)
	for scanner.Scan() {
		f := strings.SplitN(scanner.Text(), " ", 3)
		if len(f) != 3 {
			continue
		}
		payload, err := hex.DecodeString(f[2])
		if err != nil {
			payload = []byte("not hex: " + f[2])
		}
		s.mu.Lock()
		s.messages = append(s.messages, Message{Topic: f[1], QoS: f[0], Payload: string(payload)})
		s.mu.Unlock()
	}
	_ = cmd.Wait() // killed at the end of the test
}

// Messages returns the messages that have arrived, in order, without the harness's own messages.
func (s *Subscriber) Messages() []Message {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(s.messages), func(m Message) bool { return strings.HasPrefix(m.Topic, "harness/ready/") })
}

func (s *Subscriber) received(is func(Message) bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.messages, is)
}

// Wait waits for a message on the topic whose payload contains the text.
func (s *Subscriber) Wait(topic, text string) Message {
	s.t.Helper()
	var found Message
	Eventually(s.t, edgeTimeout, func() error {
		for _, m := range s.Messages() {
			if m.Topic == topic && strings.Contains(m.Payload, text) {
				found = m
				return nil
			}
		}
		return fmt.Errorf("no message with %q on %s among %d", text, topic, len(s.Messages()))
	})
	return found
}

// Publish sends a message with mosquitto_pub, a client independent of Tripod.
func Publish(address, topic string, qos int, payload string) error {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return err
	}
	from := "-s" // standard input, which must not be empty
	if payload == "" {
		from = "-n"
	}
	c := exec.Command("/usr/bin/mosquitto_pub", "-h", host, "-p", port, "-V", "5", "-q", fmt.Sprint(qos), "-t", topic, from)
	c.Stdin = strings.NewReader(payload)
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("mosquitto_pub: %w: %s", err, out)
	}
	return nil
}
