package channel

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// node is a Router with a broker that records its calls.
type node struct {
	*Router
	mu       sync.Mutex
	sent     []string
	subs     map[string]byte
	received map[Key][]string
}

func newNode(t *testing.T, opts RouterOptions) *node {
	t.Helper()
	n := &node{subs: map[string]byte{}, received: map[Key][]string{}}
	opts.Publish = func(_ Key, topic string, qos byte, payload []byte, _ func()) {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.sent = append(n.sent, fmt.Sprintf("%s:%d:%s", topic, qos, payload))
	}
	opts.Subscribe = func(filter string, qos byte) { n.subs[filter] = qos }
	opts.Unsubscribe = func(filter string) {
		assert.Contains(t, n.subs, filter, "unsubscribed without a subscription")
		delete(n.subs, filter)
	}
	n.Router = NewRouter(opts)
	return n
}

func (n *node) open(t *testing.T, module, fd int, flags Flags, topic, group string) Key {
	t.Helper()
	key := Key{"rt", module, fd}
	require.NoError(t, n.Open(key, Open{FD: fd, Flags: flags, Topic: topic}, group, func(payload []byte) {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.received[key] = append(n.received[key], string(payload))
	}))
	return key
}

func TestLoopback(t *testing.T) {
	n := newNode(t, RouterOptions{})
	sender := n.open(t, 0, 0, ReadWrite|QoS1, "app/a", "")
	sameModule := n.open(t, 0, 1, Read, "app/a", "")
	sameRuntime := n.open(t, 1, 0, Read, "app/+", "")
	below := n.open(t, 2, 0, Read, "app/a/#", "")
	writer := n.open(t, 3, 0, Write, "app/a", "")
	other := n.open(t, 3, 1, Read, "app/b", "")

	require.NoError(t, n.Publish(sender, []byte("one"), nil))
	for _, k := range []Key{sameModule, sameRuntime, below} {
		assert.Equal(t, []string{"one"}, n.received[k], "%v", k)
	}
	for _, k := range []Key{sender, writer, other} {
		assert.Empty(t, n.received[k], "%v", k)
	}
	assert.Equal(t, []string{"app/a:1:one"}, n.sent, "to the broker once, with the channel's quality of service")

	n.FromBroker("app/a", []byte("two"))
	assert.Equal(t, []string{"two"}, n.received[sender])
	assert.Equal(t, []string{"one", "two"}, n.received[sameRuntime])
	assert.Len(t, n.sent, 1, "what comes from the broker does not go back")
	assert.Equal(t, Stats{Published: 1, Delivered: 7, FromBroker: 1}, n.Stats())
}

func TestChannelsOfOneWorkerAreNotGivenTheirMessagesTwice(t *testing.T) {
	n := newNode(t, RouterOptions{})
	a := n.open(t, 0, 0, Write, "x", "worker-1")
	b := n.open(t, 1, 0, Read, "x", "worker-1")
	c := n.open(t, 2, 0, Read, "x", "worker-2")
	require.NoError(t, n.Publish(a, []byte("m"), nil))
	assert.Empty(t, n.received[b], "the worker has delivered it")
	assert.Equal(t, []string{"m"}, n.received[c])
	n.FromBroker("x", []byte("n"))
	assert.Equal(t, []string{"n"}, n.received[b])
}

func TestSpecialTopics(t *testing.T) {
	n := newNode(t, RouterOptions{})
	all := n.open(t, 0, 0, Read, "#", "")
	level := n.open(t, 0, 1, Read, "+/x", "")
	sys := n.open(t, 0, 2, Read, "$SYS/#", "")
	n.FromBroker("$SYS/x", []byte("m"))
	assert.Empty(t, n.received[all])
	assert.Empty(t, n.received[level])
	assert.Equal(t, []string{"m"}, n.received[sys])
}

func TestRefusals(t *testing.T) {
	n := newNode(t, RouterOptions{MaxPayload: 4})
	reader := n.open(t, 0, 0, Read, "a/#", "")
	writer := n.open(t, 0, 1, Write, "a/b", "")
	none := func([]byte) {}
	assert.ErrorIs(t, n.Publish(reader, nil, nil), errdefs.ErrPermissionDenied, "so nothing is published to a wildcard")
	assert.ErrorIs(t, n.Publish(Key{"rt", 0, 9}, nil, nil), errdefs.ErrNotFound)
	assert.ErrorIs(t, n.Publish(Key{"rt", 200, 0}, nil, nil), errdefs.ErrNotFound)
	assert.ErrorIs(t, n.Publish(writer, []byte("12345"), nil), errdefs.ErrInvalidArgument)
	assert.EqualValues(t, 4, n.Stats().Refused)
	assert.Empty(t, n.sent)
	assert.ErrorIs(t, n.Close(Key{"rt", 0, 9}), errdefs.ErrNotFound)
	for _, o := range []Open{
		{FD: 2, Flags: ReadWrite, Topic: "a/+"},
		{FD: 2, Flags: Write, Topic: "#"},
		{FD: 2, Flags: 0, Topic: "a"},
		{FD: 2, Flags: Read, Topic: ""},
		{FD: 2, Flags: Read, Topic: "a#"},
		{FD: 2, Flags: Read, Topic: "$SL/proc/stdio"},
		{FD: 2, Flags: Read, Topic: "$share/g/a"},
	} {
		assert.ErrorIs(t, n.Open(Key{"rt", 0, 2}, o, "", none), errdefs.ErrInvalidArgument, "%+v", o)
	}
	assert.ErrorIs(t, n.Open(writer, Open{FD: 1, Flags: Write, Topic: "other"}, "", none), errdefs.ErrAlreadyExists)
}

func TestAModuleHas256ChannelsAndNoMore(t *testing.T) {
	n := newNode(t, RouterOptions{})
	for fd := range MaxChannels {
		n.open(t, 0, fd, ReadWrite, fmt.Sprintf("t/%d", fd), "")
	}
	err := n.Open(Key{"rt", 0, 256}, Open{FD: 256, Flags: Read, Topic: "t"}, "", func([]byte) {})
	require.ErrorIs(t, err, errdefs.ErrResourceExhausted)
	n.open(t, 1, 0, Read, "t", "") // another module is not disturbed
	require.NoError(t, n.Close(Key{"rt", 0, 255}))
	n.open(t, 0, 255, Read, "again", "")
	n.open(t, 0, 255, Read, "again", "") // the same again is no further channel
	assert.Equal(t, 256, n.Count("rt", 0))
}

func TestReopeningReplacesTheReceiver(t *testing.T) {
	n := newNode(t, RouterOptions{})
	key := n.open(t, 0, 0, Read, "t", "")
	var got []string
	require.NoError(t, n.Open(key, Open{Flags: Read, Topic: "t"}, "w", func(p []byte) { got = append(got, string(p)) }))
	n.FromBroker("t", []byte("m"))
	assert.Equal(t, []string{"m"}, got)
	assert.Empty(t, n.received[key])
}

func TestClosing(t *testing.T) {
	n := newNode(t, RouterOptions{})
	a := n.open(t, 0, 0, ReadWrite, "t", "")
	b := n.open(t, 1, 0, ReadWrite, "t", "")
	require.NoError(t, n.Close(b))
	require.NoError(t, n.Publish(a, []byte("m"), nil))
	assert.Empty(t, n.received[b])
	assert.ErrorIs(t, n.Publish(b, nil, nil), errdefs.ErrNotFound)
	assert.Contains(t, n.subs, "t")
	n.CloseModule("rt", 0)
	assert.Empty(t, n.subs)
	n.open(t, 5, 0, Read, "t/#", "")
	n.CloseRuntime("rt")
	assert.Empty(t, n.subs)
	assert.Empty(t, n.channels)
	assert.Empty(t, n.modules)
	assert.Empty(t, n.table.all)
	assert.Empty(t, n.table.top.next, "no level is left behind")
}

func TestTheBrokerIsAskedForEachMessageOnce(t *testing.T) {
	n := newNode(t, RouterOptions{})
	n.open(t, 0, 0, Read|QoS2, "app/in", "")
	n.open(t, 0, 1, Read, "app/in", "")
	assert.Equal(t, map[string]byte{"app/in": 2}, n.subs)
	n.open(t, 1, 0, Read|QoS1, "app/+", "")
	assert.Equal(t, map[string]byte{"app/+": 2}, n.subs, "the wide filter takes over, at the highest quality")
	n.open(t, 2, 0, Read, "#", "")
	n.open(t, 2, 1, Read, "other", "")
	n.open(t, 2, 2, Read, "$SYS/a", "")
	assert.Equal(t, map[string]byte{"#": 2, "$SYS/a": 0}, n.subs)
	require.NoError(t, n.Close(Key{"rt", 2, 0}))
	assert.Equal(t, map[string]byte{"app/+": 2, "other": 0, "$SYS/a": 0}, n.subs)
	require.NoError(t, n.Close(Key{"rt", 0, 0}))
	assert.Equal(t, map[string]byte{"app/+": 1, "other": 0, "$SYS/a": 0}, n.subs)
	require.NoError(t, n.Close(Key{"rt", 1, 0}))
	assert.Equal(t, map[string]byte{"app/in": 0, "other": 0, "$SYS/a": 0}, n.subs)
}

// A module cannot end the node's own subscription by closing a channel on the node's topic.
func TestWhatTheNodeHoldsStays(t *testing.T) {
	n := newNode(t, RouterOptions{Held: []string{"realm/proc/control/rt/#", "realm/proc/reg/m"}})
	n.subs["realm/proc/control/rt/#"], n.subs["realm/proc/reg/m"] = 2, 2
	want := maps.Clone(n.subs)
	a := n.open(t, 0, 0, Read, "realm/proc/control/rt/#", "")
	b := n.open(t, 0, 1, Read, "realm/proc/control/rt/x", "")
	n.open(t, 0, 2, Read, "realm/proc/reg/m", "")
	assert.Equal(t, want, n.subs, "subscribed to already, and with the node's quality of service")
	c := n.open(t, 1, 0, Read, "#", "")
	assert.Subset(t, n.subs, want)
	n.FromBroker("realm/proc/control/rt/x", []byte("m"))
	for _, k := range []Key{a, b, c} {
		assert.Equal(t, []string{"m"}, n.received[k])
	}
	n.CloseRuntime("rt")
	assert.Equal(t, want, n.subs)
}

func TestRetainedMessagesReachEachChannelOnce(t *testing.T) {
	n := newNode(t, RouterOptions{})
	a := n.open(t, 0, 0, Read, "cfg/x", "")
	n.RetainedFromBroker("cfg/x", []byte("1"))
	b := n.open(t, 1, 0, Read, "cfg/x", "")
	n.RetainedFromBroker("cfg/x", []byte("1")) // because the subscription was renewed for b
	assert.Equal(t, []string{"1"}, n.received[a])
	assert.Equal(t, []string{"1"}, n.received[b])
	n.FromBroker("cfg/x", []byte("2"))
	n.FromBroker("cfg/x", []byte("2"))         // a live message is always delivered
	n.RetainedFromBroker("cfg/x", []byte("2")) // after a reconnection
	assert.Equal(t, []string{"1", "2", "2"}, n.received[a])
	n.RetainedFromBroker("cfg/x", []byte("3")) // changed while the broker was away
	assert.Equal(t, []string{"1", "2", "2", "3"}, n.received[a])
}

// Whatever is opened and closed, the subscriptions must match every message that a channel wants.
func FuzzSubscriptionsCoverWhatIsOpen(f *testing.F) {
	names := []string{"a", "a/b", "a/+", "a/#", "+/b", "#", "a/b/c", "+/+", "+/#", "$x/a", "$x/#", "a/+/c"}
	topics := []string{"a", "a/b", "a/c", "b", "b/b", "a/b/c", "a/x/c", "$x/a", "$x", "a/b/c/d"}
	f.Add([]byte{3, 1, 2, 0, 1 | 0x80, 5, 3 | 0x80, 8, 7, 5 | 0x80}, false)
	f.Add([]byte{5, 3, 5 | 0x80, 1, 3 | 0x80}, true)
	f.Fuzz(func(t *testing.T, steps []byte, holds bool) {
		held := map[string]byte{}
		if holds {
			held = map[string]byte{"a/#": 2, "$x/a": 2}
		}
		n := newNode(t, RouterOptions{Held: slices.Collect(maps.Keys(held))})
		maps.Copy(n.subs, held)
		for _, s := range steps {
			which := int(s&0x7f) % (2 * len(names))
			key := Key{"rt", which / len(names), which % len(names)}
			if s&0x80 != 0 {
				_ = n.Close(key)
			} else {
				n.open(t, key.Module, key.FD, Read|[]Flags{0, QoS1, QoS2}[s%3], names[key.FD], "")
			}
		}
		for _, topic := range topics {
			var want int
			for _, c := range n.channels {
				if !Covers(c.topic, topic) {
					continue
				}
				want++
				var brought int
				for filter, qos := range n.subs {
					if Covers(filter, topic) && qos >= c.flags.QoS() {
						brought++
					}
				}
				assert.Positive(t, brought, "nothing brings %s to %s: %v", topic, c.topic, n.subs)
			}
			assert.Len(t, n.table.match(nil, topic), want, "the tree and Match differ on %s", topic)
		}
		for filter := range n.subs {
			for other := range n.subs {
				assert.False(t, filter != other && held[other] == 0 && Covers(filter, other), "%s and %s are subscribed to", filter, other)
			}
		}
		n.CloseRuntime("rt")
		assert.Equal(t, held, n.subs)
	})
}

func TestMessagesWhileChannelsComeAndGo(t *testing.T) {
	n := NewRouter(RouterOptions{Publish: func(Key, string, byte, []byte, func()) {}, Subscribe: func(string, byte) {},
		Unsubscribe: func(string) {}})
	sender := Key{"rt", 0, 0}
	require.NoError(t, n.Open(sender, Open{Flags: Write, Topic: "t"}, "", func([]byte) {}))
	var all sync.WaitGroup
	for m := range 4 {
		all.Go(func() {
			for range 200 {
				key := Key{"rt", m + 1, 0}
				assert.NoError(t, n.Open(key, Open{Flags: Read, Topic: []string{"t", "+", "#", "x"}[m]}, "", func([]byte) {}))
				assert.NoError(t, n.Publish(sender, nil, nil))
				assert.NoError(t, n.Close(key))
			}
		})
	}
	all.Wait()
}

// A message between two modules of a node takes well under 10 µs. The test allows for a busy machine and the race
// detector.
func TestLoopbackIsFast(t *testing.T) {
	n, sender := busyRouter(t)
	times := make([]time.Duration, 1001)
	payload := []byte("message")
	for i := range times {
		start := time.Now()
		require.NoError(t, n.Publish(sender, payload, nil))
		times[i] = time.Since(start)
	}
	slices.Sort(times)
	assert.Less(t, times[len(times)/2], 10*time.Microsecond)
}

func BenchmarkLoopback(b *testing.B) {
	n, sender := busyRouter(b)
	payload := []byte("message")
	b.ReportAllocs()
	for b.Loop() {
		if err := n.Publish(sender, payload, nil); err != nil {
			b.Fatal(err)
		}
	}
}

// busyRouter makes a Router with 128 modules with 8 channels each. A message of the sender matches one of them.
func busyRouter(tb testing.TB) (*Router, Key) {
	n := NewRouter(RouterOptions{Publish: func(Key, string, byte, []byte, func()) {}, Subscribe: func(string, byte) {},
		Unsubscribe: func(string) {}})
	for m := range 128 {
		for fd := range 8 {
			o := Open{FD: fd, Flags: Read, Topic: fmt.Sprintf("app/%d/%d", m, fd)}
			if fd == 7 {
				o.Topic = fmt.Sprintf("other/%d/+", m)
			}
			require.NoError(tb, n.Open(Key{"rt", m, fd}, o, "", func([]byte) {}))
		}
	}
	sender := Key{"rt", 0, 100}
	require.NoError(tb, n.Open(sender, Open{FD: 100, Flags: Write, Topic: "app/64/3"}, "", func([]byte) {}))
	return n, sender
}
