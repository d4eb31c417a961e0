package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// small is the size of each message's payload, in bytes.
const small = 64

// batch is half the number of messages that may be in flight to a subscriber. The broker queues up to 1000 messages for
// each subscriber and drops the rest.
const batch = 250

// latency makes a module send messages to another module and back, and prints the latencies that the first module
// measures.
func (b *bench) latency(ctx context.Context, n int) error {
	relay, data := b.module("relay", "bench/there", "bench/back", "plain")
	if err := b.order(ctx, wire.ActionCreate, data); err != nil {
		return err
	}
	ready := func(m mqtt.Message) bool { // the relay's channels are open
		return m.Topic == b.topics.RuntimeLog(relay) && strings.Contains(string(m.Payload), "ready")
	}
	if err := b.await(ctx, "the relay is ready", ready); err != nil {
		return err
	}
	ping, data := b.module("ping", "bench/back", "bench/there", strconv.Itoa(n), strconv.Itoa(small))
	if err := b.order(ctx, wire.ActionCreate, data); err != nil {
		return err
	}
	var p50, p99, largest int64
	err := b.await(ctx, "the module has measured", func(m mqtt.Message) bool {
		var count, bytes int
		_, err := fmt.Sscanf(string(m.Payload), "one way: n %d bytes %d p50 %d p99 %d max %d ns", &count, &bytes, &p50, &p99, &largest)
		return m.Topic == b.topics.RuntimeLog(ping) && err == nil
	})
	if err != nil {
		return err
	}
	fmt.Printf("| a message from one module to another of the same worker (%d bytes, QoS 1) | p50 | p99 | slowest |\n|---|---:|---:|---:|\n",
		small)
	fmt.Printf("| µs, %d messages, half of the time there and back | %.1f | %.1f | %.1f |\n\n", n, micro(p50), micro(p99), micro(largest))
	return b.remove(ctx, relay)
}

func micro(nanos int64) float64 { return float64(nanos) / 1000 }

// rates compares how fast one subscriber receives messages from a module and from a plain client. It measures the two
// alternately. The parameter turns is how often it measures each.
func (b *bench) rates(ctx context.Context, url string, n, turns int) error {
	var own, plain []float64
	for range turns {
		r, err := b.turn(ctx, url, n, "bench/plain", func() (func() error, error) { return b.plain(ctx, url, n, "bench/plain") })
		if err != nil {
			return err
		}
		plain = append(plain, r)
		if r, err = b.turn(ctx, url, n, "bench/module", func() (func() error, error) { return b.flood(ctx, n, "bench/module") }); err != nil {
			return err
		}
		own = append(own, r)
	}
	mine, theirs := median(own), median(plain)
	fmt.Printf("| messages through the embedded broker (%d bytes, QoS 1, median of %d turns of %d) | module | plain client | module : plain |\n|---|---:|---:|---:|\n", small, turns, n)
	fmt.Printf("| messages/s at one subscriber | %.0f | %.0f | %.2f |\n\n", mine, theirs, mine/theirs)
	return nil
}

// turn returns how many messages per second a subscriber receives. The given function must publish n messages. The
// subscriber acknowledges each batch, and the publisher waits for this; otherwise the broker would drop the messages
// that it cannot deliver.
func (b *bench) turn(ctx context.Context, url string, n int, topic string, publish func() (end func() error, err error)) (float64, error) {
	var count atomic.Int64
	var first time.Time
	took, batches := make(chan time.Duration, 1), make(chan struct{}, n)
	sub, err := connect(ctx, url, func(mqtt.Message) { // never called concurrently
		got := count.Add(1)
		if got == 1 {
			first = time.Now()
		}
		if got%batch == 0 {
			batches <- struct{}{}
		}
		if got == int64(n) {
			took <- time.Since(first)
		}
	})
	if err != nil {
		return 0, err
	}
	defer closeClient(sub)
	if err := sub.Subscribe(ctx, topic, 1, mqtt.SubscribeOptions{}); err != nil {
		return 0, err
	}
	end, err := publish()
	if err != nil {
		return 0, err
	}
	deadline := time.After(limit)
	for {
		select {
		case <-batches:
			if err := sub.Publish(ctx, topic+"/credit", 1, false, []byte("go on")); err != nil {
				return 0, err
			}
		case t := <-took:
			return float64(n-1) / t.Seconds(), end()
		case <-deadline:
			return 0, fmt.Errorf("%d of %d messages arrived on %s", count.Load(), n, topic)
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// plain publishes from a plain client the same messages that flood publishes from a module.
func (b *bench) plain(ctx context.Context, url string, n int, topic string) (func() error, error) {
	credit := make(chan struct{}, n)
	client, err := connect(ctx, url, func(mqtt.Message) { credit <- struct{}{} })
	if err != nil {
		return nil, err
	}
	if err := client.Subscribe(ctx, topic+"/credit", 1, mqtt.SubscribeOptions{}); err != nil {
		return nil, err
	}
	failed := make(chan error, 1)
	go func() {
		payload := slices.Repeat([]byte("x"), small)
		for i := range n {
			if i >= 2*batch && i%batch == 0 {
				<-credit
			}
			if err := client.Publish(ctx, topic, 1, false, payload); err != nil {
				failed <- err
				return
			}
		}
		failed <- nil
	}()
	return func() error { defer closeClient(client); return <-failed }, nil
}

func (b *bench) flood(ctx context.Context, n int, topic string) (func() error, error) {
	id, data := b.module("ping", topic+"/credit", topic, "flood", strconv.Itoa(n), strconv.Itoa(small), strconv.Itoa(batch))
	if _, err := b.create(ctx, b.topics.Control(), id, data); err != nil {
		return nil, err
	}
	return func() error { return b.remove(ctx, id) }, nil
}

// creation measures how long it takes to create a module. It creates modules one after the other, first by orders to
// the orchestrator, then by orders to the manager. The code of the modules is already compiled.
func (b *bench) creation(ctx context.Context, rounds int) error {
	fmt.Printf("| ms from create to the manager's report that the module runs, %d modules one after the other | p50 | p95 |\n|---|---:|---:|\n", rounds)
	for _, way := range []struct{ name, to string }{
		{"client → broker → orchestrator → broker → manager → worker, and back", b.topics.Control()},
		{"client → broker → manager → worker, and back", b.topics.ControlOf(b.uuid)},
	} {
		var took []float64
		for i := range rounds + 1 {
			id, data := b.module("relay", "bench/in", "bench/out")
			t, err := b.create(ctx, way.to, id, data)
			if err != nil {
				return err
			}
			if err := b.remove(ctx, id); err != nil {
				return err
			}
			if i > 0 { // skip the first module, which might have had to be compiled
				took = append(took, t.Seconds()*1000)
			}
		}
		slices.Sort(took)
		fmt.Printf("| %s | %.2f | %.2f |\n", way.name, median(took), took[len(took)*95/100])
	}
	fmt.Println()
	return nil
}

// crowd measures how long it takes until many modules run on one runtime at the same time.
func (b *bench) crowd(ctx context.Context, many int) error {
	ids, began := make([]string, many), time.Now()
	left := map[string]bool{}
	for i := range ids {
		id, data := b.module("relay", fmt.Sprintf("bench/%d/in", i), fmt.Sprintf("bench/%d/out", i))
		ids[i], left[id] = id, true
		if err := b.order(ctx, wire.ActionCreate, data); err != nil {
			return err
		}
	}
	err := b.await(ctx, fmt.Sprintf("%d modules run", many), func(m mqtt.Message) bool {
		for id, state := range b.states(m) {
			if state == "running" {
				delete(left, id)
			}
		}
		return len(left) == 0
	})
	if err != nil {
		return fmt.Errorf("%w (%d do not run)", err, len(left))
	}
	up := time.Since(began)
	began = time.Now()
	if err := b.remove(ctx, ids...); err != nil {
		return err
	}
	fmt.Printf("| %d modules on one runtime | all run after | all gone after |\n|---|---:|---:|\n| s | %.2f | %.2f |\n", many, up.Seconds(),
		time.Since(began).Seconds())
	return nil
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}
