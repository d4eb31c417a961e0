package worker

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/semaphore"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wit"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// subscriber is a program that handles messages: a component that exports wasi:messaging/incoming-handler. It handles the
// messages of one channel in their order, and those of different channels at the same time.
type subscriber struct {
	pod     *pod
	pool    pool
	limits  atomic.Pointer[workerapi.Limits]
	slots   *semaphore.Weighted // of Limits.Concurrency when the pod was started
	readers sync.WaitGroup
	ended   chan exit
}

func newSubscriber(p *pod) *subscriber {
	return &subscriber{pod: p, pool: pool{pod: p}, ended: make(chan exit, 1)}
}

func (s *subscriber) start() error {
	spec := &s.pod.spec
	switch {
	case len(spec.Ports) > 0:
		return fmt.Errorf("pod %s: a component that handles messages serves no ports: %w", spec.ID, errdefs.ErrInvalidArgument)
	case spec.Stdin:
		return fmt.Errorf("pod %s: stdin is for commands, but this component handles messages: %w", spec.ID, errdefs.ErrInvalidArgument)
	case s.pod.messages == nil:
		return fmt.Errorf("pod %s: a component that handles messages needs channels: %w", spec.ID, errdefs.ErrInvalidArgument)
	}
	_ = s.updateLimits(spec.Limits)
	s.slots = semaphore.NewWeighted(int64(spec.Limits.Concurrency))
	if err := s.pool.probe(spec.Limits); err != nil {
		return err
	}
	ports, err := s.pod.messages.openAll()
	if err != nil {
		return fmt.Errorf("pod %s: %w", spec.ID, err)
	}
	readable := 0
	for _, p := range ports {
		if p.flags.CanRead() {
			readable++
			s.readers.Go(func() { s.read(p) })
		}
	}
	if readable == 0 {
		return fmt.Errorf("pod %s: the component handles messages, but has no channel to read from: %w", spec.ID, errdefs.ErrInvalidArgument)
	}
	go s.watch()
	return nil
}

// watch waits for the end of all channels.
func (s *subscriber) watch() {
	s.readers.Wait()
	s.pool.close()
	if s.pod.alive.Err() != nil {
		s.ended <- killed("messages were still being handled when the grace period expired")
		return
	}
	s.ended <- exit{reason: reasonCompleted, message: "stopped"}
}

// read handles the messages of a channel until its end.
func (s *subscriber) read(p *portResource) {
	for {
		m, err := p.next(s.pod.alive, time.Time{})
		if err != nil {
			return
		}
		if s.slots.Acquire(s.pod.alive, 1) != nil {
			return
		}
		s.handle(p.name, m)
		s.slots.Release(1)
	}
}

// handle passes a message to the guest. Whether it fails or not, the message is not passed again.
func (s *subscriber) handle(topic string, m []byte) {
	counts := &s.pod.counts
	counts.requests.Add(1)
	counts.active.Add(1)
	defer counts.active.Add(-1)
	what := fmt.Sprintf("message on channel %q", topic)
	limits := *s.limits.Load()
	g, err := s.pool.get(s.pod.alive, limits)
	if err != nil {
		s.pod.count(s.pod.alive, what, err)
		return
	}
	defer s.pool.put(g, limits)
	result, err := g.Call(s.pod.alive, s.pod.code.handle, wit.AppendU32(nil, g.state.PutMessage(topic, m)), nil)
	if err != nil {
		s.pod.count(s.pod.alive, what, err)
		return
	}
	if err := wasi.ReadHandled(result); err != nil {
		s.pod.output.logLine(fmt.Sprintf("tripod: %s: the component could not handle it: %s", what, shorten(err.Error())))
	}
}

// stop ends the channels. The messages that are already queued are handled before.
func (s *subscriber) stop() { s.pod.channels.stop() }

func (s *subscriber) wait() exit { return <-s.ended }

func (s *subscriber) updateTLS(workerapi.TLS) error {
	return fmt.Errorf("pod %s handles messages and serves no TLS: %w", s.pod.spec.ID, errdefs.ErrFailedPrecondition)
}

func (s *subscriber) updateLimits(l workerapi.Limits) error {
	s.limits.Store(&l)
	return nil
}

func (s *subscriber) metrics() []workerapi.MethodMetrics { return nil }

var _ program = (*subscriber)(nil)

// messages implements wasi.Messages: the topics are the names of the pod's channels.
type messages struct {
	channels *channels

	mu   sync.Mutex
	open map[string]*portResource
}

// openAll opens all channels, in every mode that their configuration allows.
func (m *messages) openAll() ([]*portResource, error) {
	var all []*portResource
	for _, name := range slices.Sorted(maps.Keys(m.channels.named)) {
		p, a, err := m.channels.openFully(name)
		if err != nil {
			return nil, err
		}
		r := &portResource{p, a}
		m.open[name] = r
		all = append(all, r)
	}
	return all, nil
}

// port returns the open channel for messages to a topic.
func (m *messages) port(topic string) (*portResource, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p := m.open[topic]; p != nil {
		return p, nil
	}
	a := make(notifier, 1)
	p, err := m.channels.open(topic, false, true, a.wake)
	if err != nil {
		return nil, err
	}
	m.open[topic] = &portResource{p, a}
	return m.open[topic], nil
}

// Send implements wasi.Messages.
func (m *messages) Send(ctx context.Context, topic string, data []byte) error {
	if len(data) > channel.DefaultMaxFrame {
		return fmt.Errorf("the message is longer than %d bytes: %w", channel.DefaultMaxFrame, errdefs.ErrInvalidArgument)
	}
	p, err := m.port(topic)
	if err != nil {
		return err
	}
	if !p.flags.CanWrite() {
		return fmt.Errorf("channel %q has mode %s: %w", topic, p.flags, errdefs.ErrPermissionDenied)
	}
	return p.publish(ctx, data)
}
