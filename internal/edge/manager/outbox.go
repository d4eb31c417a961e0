package manager

import (
	"context"
	"sync"
	"time"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/guard"
)

// outbox queues the messages for one module, so that a module that does not read does not delay the others.
type outbox struct {
	h     *host
	index int
	uuid  string // of the module
	queue *queue[delivery]

	mu  sync.Mutex
	run context.Context // of the runtime's connection; nil without one
	end context.CancelFunc
}

// delivery is a message for a channel of the module.
type delivery struct {
	fd      int
	topic   string // or filter, of the channel
	payload []byte
}

func newOutbox(h *host, index int, uuid string) *outbox {
	l := h.m.config.Limits
	return &outbox{h: h, index: index, uuid: uuid, queue: newQueue[delivery](l.Messages, l.Bytes)}
}

// put queues a message. A full queue drops its oldest messages.
func (o *outbox) put(fd int, topic string, payload []byte) {
	dropped, _ := o.queue.put(delivery{fd, topic, payload}, len(payload), true)
	o.drop("slow-module", nil, dropped...)
}

// drop counts and logs deliveries that the module does not get.
func (o *outbox) drop(reason string, err error, all ...delivery) {
	for topic, n := range countBy(all, func(d delivery) string { return d.topic }) {
		o.h.m.drop(loss{reason, o.uuid, topic}, n, err)
	}
}

// countBy counts items by a key. It returns nil if there are no items.
func countBy[T any, K comparable](all []T, key func(T) K) (counts map[K]int) {
	if len(all) > 0 {
		counts = map[K]int{}
	}
	for _, one := range all {
		counts[key(one)]++
	}
	return counts
}

// start delivers messages until the runtime's connection ends.
func (o *outbox) start(run context.Context) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.run == run {
		return
	}
	if o.end != nil {
		o.end()
	}
	var ctx context.Context
	o.run = run
	ctx, o.end = context.WithCancel(run)
	o.h.m.wg.Go(guard.Loop(o.h.m.log, "edge messages", func() { o.deliver(ctx) }))
}

// clear ends the deliveries and drops the queue.
func (o *outbox) clear() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.end != nil {
		o.end()
	}
	o.run, o.end = nil, nil
	o.drop("module-ended", nil, o.queue.empty()...)
}

func (o *outbox) deliver(ctx context.Context) {
	for {
		d, ok := o.queue.take()
		if !ok {
			select {
			case <-o.queue.more:
				continue
			case <-ctx.Done():
				return
			}
		}
		err := o.h.rt.Send(ctx, channel.Message{Header: channel.Header{Module: o.index, Arg: d.fd}, Payload: d.payload})
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			o.drop("runtime", err, d)
		}
	}
}

// limiter limits a module's messages with two token buckets. Each bucket holds one second's worth. Only one goroutine
// uses a limiter.
type limiter struct {
	limits          Limits
	messages, bytes float64
	last            time.Time
}

func newLimiter(l Limits) *limiter {
	return &limiter{limits: l, messages: max(l.MessagesPerSecond, 1), bytes: l.BytesPerSecond}
}

// allow reports whether a message of the given size can pass now. A message larger than the bucket passes when the
// bucket is full.
func (l *limiter) allow(now time.Time, size int) bool {
	if l.limits.MessagesPerSecond <= 0 && l.limits.BytesPerSecond <= 0 {
		return true
	}
	passed := now.Sub(l.last).Seconds()
	l.last = now
	l.messages = min(l.messages+passed*l.limits.MessagesPerSecond, max(l.limits.MessagesPerSecond, 1))
	l.bytes = min(l.bytes+passed*l.limits.BytesPerSecond, l.limits.BytesPerSecond)
	need := min(float64(size), l.limits.BytesPerSecond)
	if l.limits.MessagesPerSecond > 0 && l.messages < 1 || l.limits.BytesPerSecond > 0 && l.bytes < need {
		return false
	}
	l.messages--
	l.bytes -= need
	return true
}
