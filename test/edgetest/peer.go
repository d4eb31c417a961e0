package edgetest

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	paho "github.com/eclipse/paho.mqtt.golang"
)

// wait bounds each exchange with a broker. It is long, because machines can be busy.
const wait = 30 * time.Second

// PeerOptions configure a Peer.
type PeerOptions struct {
	URL   string // mqtt://HOST:PORT
	ID    string
	Plain bool  // an ordinary client, without the bridge bit, the user and the empty password
	Will  *Line // nil: no will
}

// Peer is an MQTT client like those of public peers: version 3.1.1 with the bridge bit, a user name, and the password
// flag with an empty password.
type Peer struct {
	client paho.Client
	conn   atomic.Pointer[net.Conn]

	mu    sync.Mutex
	more  *sync.Cond
	queue []func()
	done  bool
}

// Dial connects a peer.
func Dial(o PeerOptions) (*Peer, error) {
	u, err := url.Parse(o.URL)
	if err != nil {
		return nil, err
	}
	p := &Peer{}
	p.more = sync.NewCond(&p.mu)
	opts := paho.NewClientOptions().AddBroker("tcp://" + u.Host).SetClientID(o.ID).SetCleanSession(true).
		SetAutoReconnect(false).SetConnectRetry(false).SetConnectTimeout(wait).SetKeepAlive(wait).SetProtocolVersion(4)
	if !o.Plain {
		opts.SetProtocolVersion(0x84).SetUsername("cli")
	}
	if o.Will != nil {
		opts.SetBinaryWill(o.Will.Topic, o.Will.Payload, o.Will.QoS, false)
	}
	opts.SetCustomOpenConnectionFn(func(*url.URL, paho.ClientOptions) (net.Conn, error) {
		conn, err := net.DialTimeout("tcp", u.Host, wait)
		if err != nil {
			return nil, err
		}
		if !o.Plain {
			conn = &emptyPassword{Conn: conn}
		}
		p.conn.Store(&conn)
		return conn, nil
	})
	p.client = paho.NewClient(opts)
	if err := done(p.client.Connect(), "connect to "+o.URL); err != nil {
		return nil, err
	}
	go p.work()
	return p, nil
}

func done(t paho.Token, what string) error {
	if !t.WaitTimeout(wait) {
		return fmt.Errorf("%s: not done within %s", what, wait)
	}
	if err := t.Error(); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// work calls the handlers, one at a time, because paho does not allow publishing in its own callbacks.
func (p *Peer) work() {
	for {
		p.mu.Lock()
		for len(p.queue) == 0 && !p.done {
			p.more.Wait()
		}
		if p.done {
			p.mu.Unlock()
			return
		}
		next := p.queue[0]
		p.queue = p.queue[1:]
		p.mu.Unlock()
		next()
	}
}

func (p *Peer) later(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.queue = append(p.queue, f)
	p.more.Signal()
}

// Subscribe subscribes to a filter. The handler is called for each message, in order.
func (p *Peer) Subscribe(filter string, handler func(Line)) error {
	return done(p.client.Subscribe(filter, 2, func(_ paho.Client, m paho.Message) {
		l := Line{Topic: m.Topic(), QoS: m.Qos(), Payload: m.Payload(), Retained: m.Retained()}
		p.later(func() { handler(l) })
	}), "subscribe to "+filter)
}

// Unsubscribe ends a subscription.
func (p *Peer) Unsubscribe(filter string) error {
	return done(p.client.Unsubscribe(filter), "unsubscribe from "+filter)
}

// Publish sends a message. With QoS 1 and 2 it waits for the broker's acknowledgement.
func (p *Peer) Publish(topic string, qos byte, payload []byte) error {
	return done(p.client.Publish(topic, qos, false, payload), "publish to "+topic)
}

// PublishRetained is like Publish, but the broker retains the message.
func (p *Peer) PublishRetained(topic string, qos byte, payload []byte) error {
	return done(p.client.Publish(topic, qos, true, payload), "publish to "+topic)
}

// Close disconnects; the broker does not publish the will.
func (p *Peer) Close() {
	p.client.Disconnect(250)
	p.stop()
}

// Kill drops the connection; the broker publishes the will.
func (p *Peer) Kill() {
	if conn := p.conn.Load(); conn != nil {
		(*conn).Close()
	}
	p.stop()
}

func (p *Peer) stop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done = true
	p.more.Signal()
}

// emptyPassword adds the password flag and an empty password to the CONNECT, because paho cannot send them. The CONNECT
// is the first packet on the connection.
type emptyPassword struct {
	net.Conn
	head []byte // the part of the CONNECT written so far
	sent bool
}

func (c *emptyPassword) Write(b []byte) (int, error) {
	if c.sent {
		return c.Conn.Write(b)
	}
	c.head = append(c.head, b...)
	length, n := binary.Uvarint(c.head[1:]) // MQTT encodes the remaining length as a varint
	if n <= 0 || len(c.head) < 1+n+int(length) {
		return len(b), nil
	}
	c.sent = true
	body := append(bytes.Clone(c.head[1+n:]), 0, 0)
	const flags = 7 // follows the length, "MQTT" and the level
	body[flags] |= 0x40
	out := append(binary.AppendUvarint([]byte{c.head[0]}, uint64(len(body))), body...)
	if _, err := c.Conn.Write(out); err != nil {
		return 0, err
	}
	return len(b), nil
}

// object is a JSON object.
type object map[string]any

// envelope has the fields of a control message that peers use.
type envelope struct {
	ObjectID string `json:"object_id"`
	Action   string `json:"action"`
	Type     string `json:"type"`
	Data     object `json:"data"`
}

func (e envelope) request() bool { return e.Type == "arts_req" || e.Type == "req" }

// kind returns the type of requests of the seed's peers or of later ones.
func kind(later bool) string {
	if later {
		return "req"
	}
	return "arts_req"
}

// text returns a string field of the data.
func (e envelope) text(name string) string {
	s, _ := e.Data[name].(string)
	return s
}

// Message returns a control message. An empty id is replaced by a new one.
func Message(id, action, kind string, data map[string]any) []byte {
	if id == "" {
		id = newID()
	}
	o := object{"object_id": id, "type": kind, "data": data}
	if action != "" {
		o["action"] = action
	}
	b, err := json.Marshal(o)
	if err != nil {
		panic(err) // the data come from tests
	}
	return b
}

var lastID atomic.Uint64

func newID() string { return fmt.Sprintf("edgetest-%d", lastID.Add(1)) }

// Topics of a realm, without internal/edge/wire.
func reg(realm, uuid string) string   { return realm + "/proc/reg/" + uuid }
func ctl(realm string) string         { return realm + "/proc/control" }
func ctlOf(realm, uuid string) string { return realm + "/proc/control/" + uuid }

func lastLevel(topic string) string { return topic[strings.LastIndex(topic, "/")+1:] }
