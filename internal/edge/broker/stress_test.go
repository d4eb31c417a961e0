package broker_test

import (
	"encoding/binary"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/edge/broker"
)

// scale returns the size of a test: the second one in make test-all, which takes minutes and up to 2 GB.
func scale(short, long int) int {
	if os.Getenv("TRIPOD_TEST_FULL") != "" {
		return long
	}
	return short
}

// unmoved is the time that an exchange between other clients may take during a stress, on a busy machine.
const unmoved = 10 * time.Second

// neighbour exchanges messages with QoS 1 with itself from now on. The returned function ends it, and checks that no exchange
// took longer than unmoved.
func neighbour(t testing.TB, s *server) (finish func()) {
	t.Helper()
	l, _ := login(t, s, 4, hello{id: "neighbour"})
	l.join(1, "neighbour")
	stop, ended := make(chan struct{}), make(chan error, 1)
	count, worst := 0, time.Duration(0)
	go func() {
		for {
			select {
			case <-stop:
				ended <- nil
				return
			case <-time.After(time.Millisecond): // pacing
			}
			began := time.Now()
			if err := echo(l.conn, uint16(count%60_000+1)); err != nil {
				ended <- err
				return
			}
			count++
			worst = max(worst, time.Since(began))
		}
	}()
	return sync.OnceFunc(func() {
		t.Helper()
		close(stop)
		require.NoError(t, <-ended, "the exchange of other clients goes on")
		assert.Positive(t, count)
		t.Logf("%d exchanges meanwhile, the slowest took %v", count, worst)
	})
}

// echo publishes a message to its own client, and receives it.
func echo(conn net.Conn, id uint16) error {
	if err := conn.SetDeadline(time.Now().Add(unmoved)); err != nil {
		return err
	}
	if _, err := conn.Write(message{topic: "neighbour", qos: 1, id: id, payload: fmt.Sprint(id)}.encode(4)); err != nil {
		return err
	}
	for acknowledged, received := false, false; !acknowledged || !received; {
		f, err := readFrame(conn, 4)
		switch {
		case err != nil:
			return err
		case f.kind == typePuback && f.id == id:
			acknowledged = true
		case f.kind == typePublish && f.payload == fmt.Sprint(id) && !received:
			received = true
			if _, err := conn.Write(packet(0x40, binary.BigEndian.AppendUint16(nil, f.id))); err != nil {
				return err
			}
		default:
			return fmt.Errorf("unexpected packet %+v", f)
		}
	}
	return nil
}

// memoryOf returns a figure of a process from /proc in bytes, such as VmRSS, or VmHWM, which is its highest value.
func memoryOf(t testing.TB, pid int, name string) int64 {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	require.NoError(t, err)
	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			n, err := strconv.ParseInt(strings.Fields(value)[0], 10, 64)
			require.NoError(t, err)
			return n << 10
		}
	}
	require.Fail(t, "no "+name)
	return 0
}

// memory returns a function that checks that the broker's memory has never been more than the given number of megabytes
// above what it is now.
func memory(t testing.TB, s *server) (grewAtMost func(mb int)) {
	t.Helper()
	before := int(memoryOf(t, s.pid, "VmRSS") >> 20)
	return func(mb int) {
		t.Helper()
		peak := int(memoryOf(t, s.pid, "VmHWM") >> 20)
		t.Logf("the broker has grown from %d to at most %d MB", before, peak)
		assert.Less(t, peak-before, mb*overhead, "growth in MB")
	}
}

// silent opens connections that say nothing, as many as the limit of open files allows.
func silent(t testing.TB, s *server, count int) (opened int) {
	t.Helper()
	var files unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &files))
	count = min(count, int(files.Cur)/2-200)
	for range count {
		c, err := net.DialTimeout("tcp", s.address, patience)
		require.NoError(t, err)
		t.Cleanup(func() { c.Close() })
	}
	return count
}

// TestStressSilentConnections: of more connections that say nothing than the broker has room for, the oldest make room for
// the others, and for clients that do say something. The last ones are closed in time.
func TestStressSilentConnections(t *testing.T) {
	clients := scale(64, 1024)
	limit := connlimit.NewGroup(slog.New(slog.DiscardHandler)).Limiter("broker",
		connlimit.Config{Max: clients + clients/4, HeaderTimeout: time.Second})
	t.Cleanup(limit.Close)
	s := embedded(t, broker.Config{MaxClients: clients, Connections: limit})
	finish := neighbour(t, s)
	opened := silent(t, s, scale(400, 10_000))
	began := time.Now()
	c, _ := login(t, s, 5, hello{id: "normal"})
	c.publish(message{topic: "t", qos: 1})
	assert.Less(t, time.Since(began), unmoved, "a client that connects meanwhile")
	assert.LessOrEqual(t, limit.Stats().Open, clients+clients/4)
	require.Eventually(t, func() bool { return limit.Stats().Open == 2 }, patience, 10*time.Millisecond, "those that say nothing are closed")
	rejected := limit.Stats().Rejected
	assert.EqualValues(t, opened, rejected[connlimit.ReasonDisplaced]+rejected[connlimit.ReasonExpired], "%v", rejected)
	c.ping()
	finish()
}

// TestStressSilentMemory: a connection that says nothing costs little memory.
func TestStressSilentMemory(t *testing.T) {
	count := scale(400, 10_000)
	s := processWith(t, broker.Config{MaxClients: count})
	finish := neighbour(t, s)
	grewAtMost := memory(t, s)
	opened := silent(t, s, count)
	c, _ := login(t, s, 5, hello{id: "normal"}) // after the others
	c.ping()
	grewAtMost(8 + opened/64) // 16 KiB for each
	finish()
}

// TestStressDeafSubscribers: clients that subscribe to everything and read nothing cost what their queues may hold, and
// delay nobody.
func TestStressDeafSubscribers(t *testing.T) {
	const deaf, queue = 4, 4
	s := processWith(t, broker.Config{MaxQueued: 1000, MaxQueuedBytes: queue << 20, WriteTimeout: time.Hour})
	for i := range deaf {
		h := hello{id: fmt.Sprint("deaf", i)}
		if i%4 == 3 {
			h = keeping(h.id)
		}
		l, _ := login(t, s, 5, h)
		require.NoError(t, l.conn.(*net.TCPConn).SetReadBuffer(4096))
		l.join(byte(i%2), "#")
	}
	grewAtMost := memory(t, s)
	finish := neighbour(t, s)
	pub, _ := login(t, s, 5, hello{id: "pub"})
	for _, size := range []int{10, 64 << 10} {
		payload := strings.Repeat("x", size)
		for i := range scale(2_000, 20_000) {
			pub.publish(message{topic: "t", qos: byte(i % 2), payload: payload})
		}
	}
	finish()
	grewAtMost(deaf*queue*3 + 32) // in the queue, in garbage, and on its way to the disk
}

// TestStressLargePackets: packets above the limit are refused when they are announced, also before CONNECT, and a packet
// that is only announced costs nothing.
func TestStressLargePackets(t *testing.T) {
	s := processWith(t, broker.Config{MaxPacket: 256 << 20})
	finish := neighbour(t, s)
	grewAtMost := memory(t, s)
	header := []byte{0x30, 0xff, 0xff, 0xff, 0x7f} // PUBLISH of 256 MB
	block := make([]byte, 1<<20)
	for _, name := range []string{"announced", "slow", "fast"} {
		l, _ := login(t, s, 5, hello{id: name})
		switch name {
		case "announced":
			l.send(header)
		case "slow":
			for _, b := range header {
				l.send([]byte{b})
				time.Sleep(10 * time.Millisecond) // pacing: its bytes arrive one by one
			}
		case "fast":
			l.send(header)
			sent := 0
			for err := error(nil); err == nil; sent++ {
				_, err = l.conn.Write(block)
			}
			assert.Less(t, sent, 64, "MB that the broker has let it send")
		}
		l.refused(0x95)
	}
	early := dialLink(t, s, 5)
	early.send([]byte{0x10, 0x80, 0x80, 0x80, 4, 0, 4, 'M', 'Q', 'T', 'T', 5, 2}) // CONNECT of 8 MiB
	began := time.Now()
	early.closed()
	assert.Less(t, time.Since(began), 5*time.Second, "at once, and not when the time for CONNECT is over")

	announced := scale(12, 250) << 20 // within the limit
	const senders = 2
	var all []*link
	for i := range scale(100, 1000) {
		l, _ := login(t, s, 5, hello{id: fmt.Sprint("announces", i)})
		l.send(append(binary.AppendUvarint([]byte{0x30}, uint64(announced)), 0, 1, 't', 0))
		l.send(block[:20<<10])
		all = append(all, l)
	}
	for _, l := range all[:senders] { // they do send it
		for left := announced - 4 - 20<<10; left > 0; left -= len(block) {
			l.send(block[:min(left, len(block))])
		}
		l.ping()
	}
	finish()
	grewAtMost(senders*3*announced>>20 + len(all)/8 + 32) // what is sent, while its buffer grows, and 128 KiB for each
}

// TestStressWillStorm: when many clients are cut off at once, each of their wills arrives once.
func TestStressWillStorm(t *testing.T) {
	count := scale(100, 1000)
	s := embedded(t, broker.Config{MaxClients: count + 10})
	watch, _ := login(t, s, 5, hello{id: "watch"})
	watch.join(1, "will/+")
	finish := neighbour(t, s)
	var all []*link
	for i := range count {
		h := hello{id: fmt.Sprint("c", i), will: &message{topic: fmt.Sprint("will/", i), payload: "gone", qos: 1, retain: i%2 == 0}}
		l, _ := login(t, s, 5, h)
		all = append(all, l)
	}
	began := time.Now()
	for _, l := range all {
		l.cut()
	}
	seen := map[string]int{}
	for range count {
		seen[watch.receive().topic]++
	}
	took := time.Since(began)
	assert.Len(t, seen, count, "each will")
	watch.ping() // no other will has come
	assert.Less(t, took, 30*time.Second)
	t.Logf("%d wills in %v", count, took)
	finish()
	require.Eventually(t, func() bool { return s.stats().Clients == 2 }, patience, time.Millisecond, "watch and the neighbour")
	assert.Equal(t, (count+1)/2, s.stats().Retained)
}
