package broker_test

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/broker"
	codec "github.com/tripod-run/tripod/internal/edge/packet"
	"github.com/tripod-run/tripod/test/until"
)

// peers are the embedded broker in a process of its own, and mosquitto.
var peers = []struct {
	name  string
	start func(t testing.TB) *server
}{
	{"ours", func(t testing.TB) *server { return processWith(t, broker.Config{MaxClients: 2 * idleClients}) }}, {"mosquitto", mosquittoServer},
}

const (
	loadPayload = 64
	// loadWindow0 and loadWindow1 are the numbers of messages that a publisher sends ahead of its subscriber, or of the broker's
	// acknowledgements with QoS 1. mosquitto allows 20 with QoS 1.
	loadWindow0, loadWindow1 = 1000, 20
)

// loadFrame returns a PUBLISH with a payload of loadPayload bytes, and where its packet identifier is.
func loadFrame(topic string, qos byte) (frame []byte, id int) {
	return codec.Append(nil, &codec.Publish{Topic: topic, QoS: qos, ID: 1, Payload: make([]byte, loadPayload)}, 4), 2 + 2 + len(topic)
}

func loadConnect(t testing.TB, s *server, id string, persistent bool) net.Conn {
	c, err := net.Dial("tcp", s.address)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	_, err = c.Write(codec.Append(nil, &codec.Connect{ClientID: id, CleanStart: !persistent}, 4))
	require.NoError(t, err)
	_, err = io.ReadFull(c, make([]byte, 4))
	require.NoError(t, err)
	return c
}

// load is a publisher and a subscriber with a topic of their own.
type load struct {
	pub, sub net.Conn
	qos      byte
	frame    []byte
	id       int
	in       *bufio.Reader
	acks     *bufio.Reader
	lastID   uint16
}

func newLoad(t testing.TB, s *server, n int, qos byte) *load {
	topic := fmt.Sprintf("bench/%03d", n)
	l := &load{pub: loadConnect(t, s, fmt.Sprint("p", n), false), sub: loadConnect(t, s, fmt.Sprint("s", n), false), qos: qos}
	l.frame, l.id = loadFrame(topic, qos)
	l.in, l.acks = bufio.NewReaderSize(l.sub, 64<<10), bufio.NewReader(l.pub)
	_, err := l.sub.Write(codec.Append(nil, &codec.Subscribe{ID: 1, Filters: []codec.Subscription{{Filter: topic, QoS: qos}}}, 4))
	require.NoError(t, err)
	_, err = io.ReadFull(l.in, make([]byte, 5))
	require.NoError(t, err)
	return l
}

// send publishes messages, at most a window ahead, and returns when the subscriber has all of them.
func (l *load) send(count int) error {
	size := loadWindow0
	if l.qos == 1 {
		size = loadWindow1
	}
	window := make(chan struct{}, size)
	failed := make(chan error, 3)
	go func() { failed <- l.receive(count, window) }()
	if l.qos == 1 {
		go func() { failed <- l.acknowledged(count, window) }()
	} else {
		failed <- nil
	}
	var out []byte
	for sent := 0; sent < count; {
		window <- struct{}{}
		out = l.append(out[:0])
		for sent++; sent < count && len(window) < size; sent++ {
			window <- struct{}{}
			out = l.append(out)
		}
		if _, err := l.pub.Write(out); err != nil {
			return err
		}
	}
	if err := <-failed; err != nil {
		return err
	}
	return <-failed
}

func (l *load) append(to []byte) []byte {
	to = append(to, l.frame...)
	if l.qos == 1 {
		if l.lastID++; l.lastID == 0 {
			l.lastID = 1
		}
		binary.BigEndian.PutUint16(to[len(to)-len(l.frame)+l.id:], l.lastID)
	}
	return to
}

// receive reads the messages as the subscriber. With QoS 0 the publisher waits for it, or brokers would drop messages.
func (l *load) receive(count int, window chan struct{}) error {
	frame := make([]byte, len(l.frame))
	var acks []byte
	for range count {
		if _, err := io.ReadFull(l.in, frame); err != nil {
			return err
		}
		if l.qos == 0 {
			<-window
			continue
		}
		acks = append(acks, byte(codec.PUBACK)<<4, 2, frame[l.id], frame[l.id+1])
		if l.in.Buffered() < len(frame) {
			if _, err := l.sub.Write(acks); err != nil {
				return err
			}
			acks = acks[:0]
		}
	}
	return nil
}

func (l *load) acknowledged(count int, window chan struct{}) error {
	for range count {
		if _, err := io.ReadFull(l.acks, make([]byte, 4)); err != nil {
			return err
		}
		<-window
	}
	return nil
}

// cpuTime returns the processor time that a process has used.
func cpuTime(t testing.TB, pid int) time.Duration {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	require.NoError(t, err)
	_, fields, _ := strings.Cut(string(stat), ") ") // proc_pid_stat(5): field 3 is the first one after the name
	ticks := 0
	for _, f := range strings.Fields(fields)[11:13] { // utime, stime
		n, err := strconv.Atoi(f)
		require.NoError(t, err)
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond // USER_HZ is 100 on every architecture of Linux
}

// reportPeers reports a figure of the embedded broker and of mosquitto, and the first divided by the second.
func reportPeers(b *testing.B, unit string, ours, mosquitto float64) {
	b.ReportMetric(ours, "ours-"+unit)
	b.ReportMetric(mosquitto, "mosquitto-"+unit)
	b.ReportMetric(ours/mosquitto, "ratio")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkBroker measures the messages of 64 bytes per second from publishers to subscribers, each pair with a topic of
// its own, through the embedded broker and through mosquitto, in turns. "msg/cpu-s" is per second of the broker's
// processor time; the ratio compares these.
func BenchmarkBroker(b *testing.B) {
	for _, qos := range []byte{0, 1} {
		for _, pairs := range []int{1, 10, 100} {
			b.Run(fmt.Sprintf("qos%d/pairs=%d", qos, pairs), func(b *testing.B) {
				servers := make([]*server, len(peers))
				loads := make([][]*load, len(peers))
				for i, peer := range peers {
					servers[i] = peer.start(b)
					for n := range pairs {
						loads[i] = append(loads[i], newLoad(b, servers[i], n, qos))
					}
				}
				took, cpu := make([]time.Duration, len(peers)), make([]time.Duration, len(peers))
				sent := 0
				b.ResetTimer()
				for left := b.N; left > 0; left -= 20_000 {
					each := max(min(left, 20_000)/pairs, 1)
					sent += each * pairs
					for i := range peers {
						began, used := time.Now(), cpuTime(b, servers[i].pid)
						var all sync.WaitGroup
						for _, l := range loads[i] {
							all.Go(func() {
								if err := l.send(each); err != nil {
									b.Error(err)
								}
							})
						}
						all.Wait()
						took[i] += time.Since(began)
						cpu[i] += cpuTime(b, servers[i].pid) - used
					}
				}
				for i, peer := range peers {
					b.ReportMetric(float64(sent)/took[i].Seconds(), peer.name+"-msg/s")
				}
				reportPeers(b, "msg/cpu-s", float64(sent)/max(cpu[0].Seconds(), 0.01), float64(sent)/max(cpu[1].Seconds(), 0.01))
			})
		}
	}
}

// settled returns the memory once it has not changed for more than a second: until then, the broker may not take its clients
// for idle.
func settled(t testing.TB, pid int) (bytes int64) {
	same := 0
	until.Holds(t, "the memory does not change", func() bool {
		if now := memoryOf(t, pid, "VmRSS"); now == bytes {
			same++
		} else {
			bytes, same = now, 0
		}
		return same == 250
	})
	return bytes
}

// idleClients is the number of clients whose memory BenchmarkBrokerMemory measures.
const idleClients = 4000

// BenchmarkBrokerMemory measures what a connected, idle client costs the broker in RAM, in bytes, and what a persistent
// session with a subscription costs, whose client is away.
func BenchmarkBrokerMemory(b *testing.B) {
	for name, begin := range map[string]func(c net.Conn){
		"connection": func(net.Conn) {},
		"session": func(c net.Conn) {
			_, err := c.Write(codec.Append(nil, &codec.Subscribe{ID: 1, Filters: []codec.Subscription{{Filter: "idle/#", QoS: 1}}}, 4))
			require.NoError(b, err)
			_, err = io.ReadFull(c, make([]byte, 5))
			require.NoError(b, err)
			c.Close()
		},
	} {
		b.Run(name, func(b *testing.B) {
			var each [2]float64
			for i, peer := range peers {
				s := peer.start(b)
				before := memoryOf(b, s.pid, "VmRSS")
				for n := range idleClients {
					begin(loadConnect(b, s, fmt.Sprintf("idle-%05d", n), name == "session"))
				}
				each[i] = float64(settled(b, s.pid)-before) / idleClients
			}
			reportPeers(b, "B", each[0], each[1])
		})
	}
}

// BenchmarkBrokerStart measures how long the broker takes to start with 100 000 retained messages, and its memory then, in
// bytes for each message.
func BenchmarkBrokerStart(b *testing.B) {
	const count = 100_000
	var took, each [2]float64
	for i, peer := range peers {
		s := peer.start(b)
		c := loadConnect(b, s, "retain", false)
		var out []byte
		for n := range count {
			out = codec.Append(out,
				&codec.Publish{Topic: fmt.Sprintf("retained/%d/%d", n/100, n%100), Retain: true, Payload: make([]byte, loadPayload)}, 4)
		}
		out = codec.Append(out, &codec.Publish{Topic: "retained/last", QoS: 1, ID: 1, Retain: true, Payload: []byte("last")}, 4)
		_, err := c.Write(out)
		require.NoError(b, err)
		_, err = io.ReadFull(c, make([]byte, 4))
		require.NoError(b, err)
		c.Close()
		for range b.N {
			s.stop(b)
			began := time.Now()
			s.start(b)
			loadConnect(b, s, "started", false).Close()
			took[i] += time.Since(began).Seconds()
		}
		each[i] = float64(memoryOf(b, s.pid, "VmRSS")) / count
	}
	for i, peer := range peers {
		b.ReportMetric(each[i], peer.name+"-B/message")
	}
	reportPeers(b, "ms", 1000*took[0]/float64(b.N), 1000*took[1]/float64(b.N))
}
