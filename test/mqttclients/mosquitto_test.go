package mqttclients

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

// tools are mosquitto_pub and mosquitto_sub. A connection is a mosquitto_sub, and each publish is a mosquitto_pub, with
// another client identifier.
type tools struct{}

func startTools(testing.TB) program { return tools{} }

func (tools) connect(t testing.TB, o options, in *inbox) (connection, error) {
	c := &toolConnection{address: []string{"-h", "127.0.0.1", "-p", strconv.Itoa(o.Port), "-V", map[int]string{4: "311", 5: "5"}[o.Protocol]}}
	if len(o.Subscriptions) == 0 && o.Will == nil && o.Clean {
		return c, nil // it only publishes
	}
	args := append([]string{"-i", o.Client, "-d", "-F", "%j"}, c.address...)
	if !o.Clean {
		args = append(args, "-c")
	}
	if o.Protocol == 5 {
		args = append(args, "-x", fmt.Sprint(o.Expiry))
	}
	if o.ReceiveMaximum > 0 {
		args = append(args, "-D", "connect", "receive-maximum", fmt.Sprint(o.ReceiveMaximum))
	}
	if w := o.Will; w != nil {
		args = append(args, "--will-topic", w.Topic, "--will-payload", w.Payload, "--will-qos", fmt.Sprint(w.QoS))
		if w.Retain {
			args = append(args, "--will-retain")
		}
		if w.Delay > 0 {
			args = append(args, "-D", "will", "will-delay-interval", fmt.Sprint(w.Delay))
		}
	}
	if len(o.Subscriptions) == 0 { // mosquitto_sub demands one
		args = append(args, "-t", "unused/"+o.Client)
	}
	for _, s := range o.Subscriptions {
		args = append(args, "-t", s.Filter, "-q", fmt.Sprint(s.QoS))
		if s.Identifier > 0 {
			args = append(args, "-D", "subscribe", "subscription-identifier", fmt.Sprint(s.Identifier))
		}
		if s.RetainAsPublished {
			args = append(args, "--retain-as-published")
		}
	}
	c.sub = exec.Command("stdbuf", append([]string{"-oL", "mosquitto_sub"}, args...)...)
	c.sub.Stderr = os.Stderr
	stdout, err := c.sub.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.sub.Start(); err != nil {
		return nil, err
	}
	c.ended = make(chan struct{})
	subscribed := make(chan struct{}, 1)
	go func() {
		defer close(c.ended)
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			switch line := lines.Text(); {
			case strings.HasPrefix(line, "{"):
				in.received(fromTool(line))
			case strings.HasSuffix(line, "received CONNACK (0)"):
				in.connected(nil)
			case strings.HasPrefix(line, "Subscribed (mid: "):
				select {
				case subscribed <- struct{}{}:
				default: // again, after a reconnect
				}
			}
		}
	}()
	select {
	case <-subscribed:
		return c, nil
	case <-c.ended:
		return c, fmt.Errorf("mosquitto_sub has ended: %w", c.sub.Wait())
	case <-patient(t).Done():
		return c, fmt.Errorf("mosquitto_sub is not subscribed")
	}
}

// fromTool returns the message in a line of mosquitto_sub's format %j.
func fromTool(line string) message {
	var m struct {
		Topic, Payload string
		QoS            byte
		Retain         int
		Properties     struct {
			User          map[string]string `json:"user-properties"`
			ContentType   string            `json:"content-type"`
			ResponseTopic string            `json:"response-topic"`
			Correlation   string            `json:"correlation-data"`
			Expiry        uint32            `json:"message-expiry-interval"`
			UTF8          int               `json:"payload-format-indicator"`
			Identifier    int               `json:"subscription-identifier"`
		}
	}
	if err := json.Unmarshal([]byte(line), &m); err != nil {
		panic(fmt.Sprintf("mosquitto_sub: %v: %s", err, line))
	}
	p := m.Properties
	return message{
		Topic: m.Topic, Payload: m.Payload, QoS: m.QoS, Retain: m.Retain == 1, User: p.User, ContentType: p.ContentType,
		ResponseTopic: p.ResponseTopic,
		Correlation:   p.Correlation, Expiry: p.Expiry, UTF8: p.UTF8 == 1, Identifier: p.Identifier,
	}
}

// toolConnection is a mosquitto_sub, if it has subscriptions.
type toolConnection struct {
	address []string
	sub     *exec.Cmd
	ended   chan struct{} // closed when sub's output has ended
}

// publish runs one mosquitto_pub for each run of messages that differ in their payload only.
func (c *toolConnection) publish(ctx context.Context, messages ...message) error {
	for len(messages) > 0 {
		m, count := messages[0], 1
		args := append(publishArguments(m), c.address...)
		for count < len(messages) && strings.Join(publishArguments(messages[count]), " ") == strings.Join(publishArguments(m), " ") {
			count++
		}
		var lines strings.Builder
		switch {
		case count > 1:
			for _, m := range messages[:count] {
				fmt.Fprintln(&lines, m.Payload)
			}
			args = append(args, "-l")
		case m.Payload == "":
			args = append(args, "-n")
		default:
			args = append(args, "-m", m.Payload)
		}
		pub := exec.CommandContext(ctx, "mosquitto_pub", args...)
		pub.Stdin = strings.NewReader(lines.String())
		if out, err := pub.CombinedOutput(); err != nil {
			return fmt.Errorf("mosquitto_pub: %w: %s", err, out)
		}
		messages = messages[count:]
	}
	return nil
}

// publishArguments returns the arguments of mosquitto_pub for a message, without the payload.
func publishArguments(m message) []string {
	args := []string{"-t", m.Topic, "-q", fmt.Sprint(m.QoS)}
	if m.Retain {
		args = append(args, "-r")
	}
	property := func(set bool, words ...string) {
		if set {
			args = append(append(args, "-D", "publish"), words...)
		}
	}
	for k, v := range m.User {
		property(true, "user-property", k, v)
	}
	property(m.ContentType != "", "content-type", m.ContentType)
	property(m.ResponseTopic != "", "response-topic", m.ResponseTopic)
	property(m.Correlation != "", "correlation-data", m.Correlation)
	property(m.Expiry > 0, "message-expiry-interval", fmt.Sprint(m.Expiry))
	property(m.UTF8, "payload-format-indicator", "1")
	return args
}

// disconnect ends mosquitto_sub, which with MQTT 5 always sends the reason code for the will.
func (c *toolConnection) disconnect(context.Context, bool) error {
	if c.sub == nil {
		return nil
	}
	_ = c.sub.Process.Signal(os.Interrupt) // it sends DISCONNECT, or has ended
	// It does so in its signal handler, and deadlocks if the signal interrupts it while it sends something.
	stuck := time.AfterFunc(5*time.Second, func() { _ = c.sub.Process.Kill() })
	defer stuck.Stop()
	<-c.ended
	_ = c.sub.Wait()
	return nil
}
