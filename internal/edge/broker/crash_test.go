package broker_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/test/mosquitto"
	"github.com/tripod-run/tripod/test/races"
)

// configEnv turns the test program into a broker with this configuration, in JSON.
const configEnv = "TRIPOD_TEST_BROKER_CONFIG"

func TestMain(m *testing.M) {
	if text := os.Getenv(configEnv); text != "" {
		var cfg broker.Config
		err := json.Unmarshal([]byte(text), &cfg)
		if err == nil {
			_, err = broker.New(cfg)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		select {} // until SIGKILL
	}
	// Most tests wait: for a will's delay, a keep alive or mosquitto.
	if err := flag.Set("test.parallel", "12"); err != nil {
		panic(err)
	}
	os.Exit(races.Run(m.Run))
}

// process is an embedded broker in a process of its own; stop is SIGKILL.
func process(t testing.TB) *server { return processWith(t, broker.Config{}) }

func processWith(t testing.TB, cfg broker.Config) *server {
	s := &server{address: mosquitto.FreeAddress(t)}
	cfg.Address, cfg.Path = s.address, filepath.Join(t.TempDir(), "broker.db")
	text, err := json.Marshal(cfg)
	require.NoError(t, err)
	var cmd *exec.Cmd
	s.start = func(t testing.TB) {
		cmd = exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), configEnv+"="+string(text))
		cmd.Stderr = os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		require.NoError(t, cmd.Start())
		s.pid = cmd.Process.Pid
		require.Eventually(t, func() bool {
			c, err := net.Dial("tcp", s.address)
			if err == nil {
				c.Close()
			}
			return err == nil
		}, patience, 10*time.Millisecond)
	}
	s.stop = func(testing.TB) {
		if cmd != nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
		cmd = nil
	}
	s.start(t)
	t.Cleanup(func() { s.stop(t) })
	return s
}

// TestKilled kills the broker several times while messages are published to a disconnected client. All acknowledged
// messages, the retained messages and the session survive.
func TestKilled(t *testing.T) {
	for _, protocol := range []int{5, 4} {
		t.Run(fmt.Sprint(protocol), func(t *testing.T) {
			t.Parallel()
			s := process(t)
			ctx := patient(t)
			cfg := mqtt.Config{Protocol: protocol, ClientID: "node", SessionExpiry: time.Hour}
			node, _ := connect(t, s, cfg)
			require.NoError(t, node.Subscribe(ctx, "control/+", 2, mqtt.SubscribeOptions{}))
			require.NoError(t, node.Close(ctx))

			pub, _ := connect(t, s, mqtt.Config{Protocol: protocol, ClientID: "pub", SessionExpiry: time.Hour})
			const rounds, each = 4, 30
			for round := range rounds {
				for i := range each {
					require.NoError(t, pub.Publish(ctx, "control/node", byte(1+round%2), false, fmt.Appendf(nil, "%04d", round*each+i)))
					require.NoError(t, pub.Publish(ctx, "desired", 1, true, fmt.Appendf(nil, "%04d", round*each+i)))
				}
				// Kill it in the middle, at a different point in every round.
				want := uint64(2*each*round + each/2*(round+1)/2)
				require.Eventually(t, func() bool { return pub.Stats().Published >= want }, patience, 100*time.Microsecond)
				s.stop(t)
				s.start(t)
			}
			require.Eventually(t, func() bool { return pub.Stats().Queued == 0 }, patience, time.Millisecond)
			s.stop(t) // everything is acknowledged
			s.start(t)

			again, in := connect(t, s, cfg)
			last := fmt.Sprintf("%04d", rounds*each-1)
			in.wait(t, last)
			var want, got []string
			for i := range rounds * each {
				want = append(want, fmt.Sprintf("control/node q%d %04d", 1+i/each%2, i))
			}
			seen := map[string]bool{}
			for _, m := range in.all() { // a message whose acknowledgement was lost may arrive twice
				if !seen[m] {
					got = append(got, m)
				}
				seen[m] = true
			}
			assert.ElementsMatch(t, want, got)
			require.NoError(t, again.Subscribe(ctx, "desired", 1, mqtt.SubscribeOptions{}))
			in.wait(t, "desired q1 "+last)
		})
	}
}

// TestKilledAfterTheFirstAnswer kills the broker as soon as a publisher has PUBACK or PUBREC. The message arrives although
// the publisher does not send it again, whether the client with the persistent session was away or had the message unread.
func TestKilledAfterTheFirstAnswer(t *testing.T) {
	for _, qos := range []byte{1, 2} {
		for name, away := range map[string]bool{"away": true, "connected": false} {
			t.Run(fmt.Sprintf("QoS %d, %s", qos, name), func(t *testing.T) {
				t.Parallel()
				s := process(t)
				watch, _ := login(t, s, 5, keeping("watch"))
				watch.join(qos, "t")
				if away {
					watch.leave()
				}
				pub, _ := login(t, s, 5, keeping("pub"))
				for i := range 20 {
					m := message{topic: "t", payload: fmt.Sprint(i), qos: qos, id: uint16(i + 1)}
					pub.send(m.encode(5))
				}
				answer := map[byte]byte{1: typePuback, 2: typePubrec}[qos]
				for i := range 20 {
					require.EqualValues(t, i+1, pub.await(answer).id)
				}
				s.stop(t) // SIGKILL
				s.start(t)
				again, _ := login(t, s, 5, keeping("watch"))
				var want []string
				for i := range 20 {
					want = append(want, fmt.Sprint(i))
				}
				assert.Equal(t, want, again.payloads(20))
			})
		}
	}
}

// TestSessionEnds: removed subscriptions, ended sessions and received messages do not come back with a restart.
func TestSessionEnds(t *testing.T) {
	s := embedded(t, broker.Config{})
	ctx := patient(t)
	kept := mqtt.Config{ClientID: "node", SessionExpiry: time.Hour}
	node, in := connect(t, s, kept)
	require.NoError(t, node.Subscribe(ctx, "a", 1, mqtt.SubscribeOptions{}))
	require.NoError(t, node.Subscribe(ctx, "b", 1, mqtt.SubscribeOptions{}))
	require.NoError(t, node.Publish(ctx, "a", 1, false, []byte("received")))
	in.wait(t, "received")
	require.NoError(t, node.Unsubscribe(ctx, "b"))
	require.NoError(t, node.Close(ctx))
	s.stop(t)
	s.start(t)
	other, _ := connect(t, s, mqtt.Config{})
	require.NoError(t, other.Publish(ctx, "b", 1, false, []byte("unsubscribed")))
	require.NoError(t, other.Publish(ctx, "a", 1, false, []byte("end")))
	node, in = connect(t, s, kept)
	assert.Equal(t, []string{"a q1 end"}, in.wait(t, "end"))
	require.NoError(t, node.Close(ctx))

	clean, _ := connect(t, s, mqtt.Config{ClientID: "node"}) // ends the session
	require.NoError(t, clean.Close(ctx))
	s.stop(t)
	s.start(t)
	resumed := make(chan bool, 1)
	kept.OnConnect = func(_ context.Context, r bool) { resumed <- r }
	connect(t, s, kept)
	assert.False(t, <-resumed)
}

// TestRestartsDeferWills: a client whose will has no delay, and that is back soon after a second restart, has not been away.
func TestRestartsDeferWills(t *testing.T) {
	s := embedded(t, broker.Config{})
	watch, _ := login(t, s, 5, keeping("watch"))
	watch.join(1, "will")
	login(t, s, 4, hello{id: "c", will: &message{topic: "will", payload: "gone", qos: 1}})
	for range 2 {
		s.stop(t)
		s.start(t)
	}
	c, _ := login(t, s, 4, hello{id: "c"})
	watch, _ = login(t, s, 5, keeping("watch"))
	watch.quiet(c)
}
