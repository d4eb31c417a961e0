package h2

import (
	"fmt"
	"io"
	"net/http"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/test/until"
)

// flood is an attack on a connection. It writes until the server ends the connection, or until it has written frames.
type flood struct {
	name   string
	frames int // in all
	// write writes the i-th part. Before the first one the connection is new.
	write func(c *rawClient, i int)
	// reads says that the client reads what the server sends.
	reads bool
	// ends says that the server must end the connection before all frames are sent.
	ends bool
}

var floods = []flood{
	{"rapid reset", 50_000, func(c *rawClient, i int) {
		c.request(uint32(2*i+1), true)
		c.write(c.framer.WriteRSTStream(uint32(2*i+1), http2.ErrCodeCancel))
	}, true, true},
	{"made you reset, by a window of nothing", 50_000, func(c *rawClient, i int) {
		c.request(uint32(2*i+1), false)
		c.write(c.framer.WriteRawFrame(http2.FrameWindowUpdate, 0, uint32(2*i+1), make([]byte, 4)))
	}, true, true},
	{"made you reset, by data after the end", 50_000, func(c *rawClient, i int) {
		c.request(uint32(2*i+1), true)
		c.write(c.framer.WriteData(uint32(2*i+1), true, nil))
	}, true, true},
	{"made you reset, by a window that is too large", 50_000, func(c *rawClient, i int) {
		c.request(uint32(2*i+1), false)
		c.write(c.framer.WriteWindowUpdate(uint32(2*i+1), maxWindow))
	}, true, true},
	{"continuations", 50_000, func(c *rawClient, i int) {
		if i == 0 {
			c.write(c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte{0x82}}))
		}
		c.write(c.framer.WriteContinuation(1, false, nil))
	}, true, true},
	{"settings", 50_000, func(c *rawClient, _ int) { c.write(c.framer.WriteSettings()) }, true, true},
	{"settings that nobody reads", 50_000, func(c *rawClient, _ int) { c.write(c.framer.WriteSettings()) }, false, true},
	{"pings", 50_000, func(c *rawClient, _ int) { c.write(c.framer.WritePing(false, [8]byte{1})) }, true, true},
	{"pings that nobody reads", 50_000, func(c *rawClient, _ int) { c.write(c.framer.WritePing(false, [8]byte{1})) }, false, true},
	{"acknowledgements of pings", 50_000, func(c *rawClient, _ int) { c.write(c.framer.WritePing(true, [8]byte{1})) }, true, true},
	{"acknowledgements of settings", 50_000, func(c *rawClient, _ int) { c.write(c.framer.WriteSettingsAck()) }, true, true},
	{"headers of a stream that was reset", 50_000, func(c *rawClient, i int) {
		if i == 0 {
			c.request(1, false)
			c.write(c.framer.WriteRawFrame(http2.FrameWindowUpdate, 0, 1, make([]byte, 4)))
		}
		c.request(1, false)
	}, true, true},
	{"priorities", 50_000, func(c *rawClient, i int) {
		c.write(c.framer.WritePriority(uint32(2*i+1), http2.PriorityParam{StreamDep: 0, Weight: 1}))
	}, true, true},
	{"frames of an unknown type", 50_000, func(c *rawClient, _ int) { c.write(c.framer.WriteRawFrame(99, 0, 0, nil)) }, true, true},
	{"empty data", 50_000, func(c *rawClient, i int) {
		if i == 0 {
			c.request(1, false)
		}
		c.write(c.framer.WriteData(1, false, nil))
	}, true, true},
	{"padding", 50_000, func(c *rawClient, i int) {
		if i == 0 {
			c.request(1, false)
		}
		c.write(c.framer.WriteDataPadded(1, false, nil, []byte{0}))
	}, true, true},
	{"windows of one byte", 50_000, func(c *rawClient, i int) {
		if i == 0 {
			c.write(c.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}))
			c.request(1, true)
		}
		c.write(c.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: uint32(i % 2)}))
	}, true, true},
	{"many slow readers", 400, func(c *rawClient, i int) {
		if i == 0 {
			c.write(c.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1}))
		}
		c.request(uint32(2*i+1), true)
	}, true, false},
	{"streams over the limit", 50_000, func(c *rawClient, i int) { c.request(uint32(2*i+1), false) }, true, true},
}

// run floods a server, and returns how many frames it wrote before it could not write any more.
func (f flood) run(c *rawClient) int {
	if f.reads {
		go func() { _, _ = io.Copy(io.Discard, c.conn) }()
	}
	for i := range f.frames {
		f.write(c, i)
		if c.out.Len() < 4<<10 && i < f.frames-1 {
			continue
		}
		_ = c.conn.SetWriteDeadline(time.Now().Add(10 * time.Second))
		if c.send() != nil {
			return i
		}
	}
	return f.frames
}

// ordinaryCalls is how many calls of the neighbour a flood may cost in processor time, the attacker's own time included.
// The dearest ones cost 2 000, and 3 000 with the race detector; work that grows faster than the frames goes beyond.
const ordinaryCalls = 10_000

// TestFloods checks that floods cost a bounded number of handlers, a bounded memory and a bounded processor time, that the
// connection is ended, and that the calls of a neighbour are answered meanwhile.
func TestFloods(t *testing.T) {
	for _, f := range floods {
		t.Run(f.name, func(t *testing.T) {
			var attackers atomic.Int64
			answer := make([]byte, 1<<20)
			config := testConfig(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("X-Neighbour") == "" {
					attackers.Add(1)
					_, _ = io.Copy(io.Discard, r.Body)
					_, _ = w.Write(answer)
					<-r.Context().Done()
				}
			}))
			config.StuckTime = 500 * time.Millisecond
			s, address := start(t, config)
			neighbour := client(t)
			each := callCost(t, neighbour, address)
			before, spent := heap(), processor(t)
			stop, times := make(chan struct{}), make(chan []time.Duration, 1)
			go func() { times <- callUntil(t, neighbour, address, stop) }()
			c := dialRaw(t, address)
			written := f.run(c)
			grown := int64(heap()) - int64(before)
			close(stop)
			took := <-times
			slices.Sort(took)
			if f.ends {
				until.Holds(t, "only the neighbour's connection is left", func() bool {
					s.mu.Lock()
					defer s.mu.Unlock()
					return len(s.conns) == 1
				})
			}
			cost := int64((processor(t)-spent)/each) - int64(len(took)) // without the neighbour's own calls
			t.Logf("%d frames, %d handlers, processor time of %d calls, %d KiB; the neighbour made %d calls, the slowest hundredth took %v",
				written, attackers.Load(), cost, grown>>10, len(took), took[len(took)*99/100])
			if slowest := took[len(took)*99/100]; slowest > 5*time.Second {
				t.Errorf("the slowest hundredth of the neighbour's calls took %v, want at most 5s", slowest)
			}
			if n := attackers.Load(); n > 2*budgetBurst {
				t.Errorf("%d handlers were started, want at most %d", n, 2*budgetBurst)
			}
			if cost > ordinaryCalls {
				t.Errorf("the flood cost the processor time of %d calls, want at most %d", cost, ordinaryCalls)
			}
			if grown > 16<<20 {
				t.Errorf("the heap has grown by %d bytes, want at most 16 MiB", grown)
			}
		})
	}
}

// callCost returns the processor time of a call of the neighbour, with the server's share and the client's.
func callCost(t *testing.T, c *http.Client, address string) time.Duration {
	t.Helper()
	const calls = 500
	spent := processor(t)
	for range calls {
		call(t, c, address)
	}
	return (processor(t) - spent) / calls
}

// callUntil makes a call each millisecond until stop is closed, at least ten, and returns their durations.
func callUntil(t *testing.T, c *http.Client, address string, stop chan struct{}) (took []time.Duration) {
	pace := time.NewTicker(time.Millisecond)
	defer pace.Stop()
	for range pace.C {
		started := time.Now()
		call(t, c, address)
		took = append(took, time.Since(started))
		select {
		case <-stop:
			if len(took) >= 10 {
				return took
			}
		default:
		}
	}
	return took
}

// call makes a call of the neighbour.
func call(t *testing.T, c *http.Client, address string) {
	t.Helper()
	r, err := http.NewRequest("GET", "http://"+address, nil)
	if err != nil {
		t.Error(err)
		return
	}
	r.Header.Set("X-Neighbour", "yes")
	response, err := c.Do(r)
	if err != nil {
		t.Errorf("a neighbour's call: %v", err)
		return
	}
	response.Body.Close()
}

// processor returns the processor time that this process has used, in all threads.
func processor(t *testing.T) time.Duration {
	t.Helper()
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		t.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// heap returns the size of the live heap and the stacks.
func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}

// TestGivenUpCalls checks that calls that clients give up do not end the connection, however many they are.
func TestGivenUpCalls(t *testing.T) {
	_, address := start(t, testConfig(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })))
	c := dialRaw(t, address)
	go func() { _, _ = io.Copy(io.Discard, c.conn) }()
	id := uint32(1)
	for range 2*budgetBurst/100 + 1 {
		for i := range 100 {
			c.request(id+uint32(2*i), true)
		}
		c.write(c.send())
		time.Sleep(2 * youngStream) // pacing: the calls get old
		for range 100 {
			c.write(c.framer.WriteRSTStream(id, http2.ErrCodeCancel))
			id += 2
		}
		if err := c.send(); err != nil {
			t.Fatalf("after %d calls: %v", id/2, err)
		}
	}
}

// TestBusyClients checks that the bound for useless frames does not end connections with many pings, windows and resets
// beside real work.
func TestBusyClients(t *testing.T) {
	_, address := start(t, testConfig(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(w, r.Body) })))
	c := dialRaw(t, address)
	for i := range 10 * budgetBurst {
		id := uint32(2*i + 1)
		c.request(id, false)
		c.write(c.framer.WriteData(id, true, []byte("ping")))
		c.write(c.framer.WritePing(false, [8]byte{2}))
		c.write(c.framer.WriteWindowUpdate(0, 4))
		if i%4 == 0 {
			c.write(c.framer.WriteRSTStream(id, http2.ErrCodeCancel))
		}
		if err := c.send(); err != nil {
			t.Fatal(err)
		}
		for answered := i%4 == 0; !answered; {
			f, err := c.next()
			if err != nil {
				t.Fatal(fmt.Errorf("after %d calls: %w", i, err))
			}
			d, ok := f.(*http2.DataFrame)
			answered = ok && d.StreamID == id && d.StreamEnded()
		}
	}
}
