package broker_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/test/mosquitto"
	"github.com/tripod-run/tripod/test/until"
)

// patience bounds every wait, on a busy machine.
const patience = 60 * time.Second

func patient(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// server is a broker that a test may stop and start again with the same state, at the same address.
type server struct {
	address string
	start   func(t testing.TB)
	stop    func(t testing.TB) // gracefully
	stats   func() broker.Stats
	pid     int // if it is a process
}

func (s *server) url() string { return "mqtt://" + s.address }

func embedded(t testing.TB, cfg broker.Config) *server {
	s := &server{address: mosquitto.FreeAddress(t)}
	cfg.Address = s.address
	if cfg.Path == "" {
		cfg.Path = filepath.Join(t.TempDir(), "broker.db")
	}
	var b broker.Broker
	s.start = func(t testing.TB) {
		// A program that another test starts holds the socket of FreeAddress until its execve.
		until.NoError(t, patience, func() (err error) {
			if b, err = broker.New(cfg); err != nil && !errors.Is(err, unix.EADDRINUSE) {
				require.NoError(t, err)
			}
			return err
		})
	}
	s.stats = func() broker.Stats { return b.Stats() }
	s.stop = func(t testing.TB) {
		if b != nil {
			require.NoError(t, b.Close(patient(t)))
		}
		b = nil
	}
	s.start(t)
	t.Cleanup(func() { s.stop(t) })
	return s
}

// mosquittoServer starts mosquitto.
func mosquittoServer(t testing.TB) *server {
	m := mosquitto.New(t, "")
	s := &server{address: m.Address, stop: m.Stop, pid: m.PID()}
	s.start = func(t testing.TB) {
		m.Start(t)
		s.pid = m.PID()
	}
	return s
}

// inbox collects what a client receives.
type inbox struct {
	mu   sync.Mutex
	got  []string
	more chan struct{}
}

func newInbox() *inbox { return &inbox{more: make(chan struct{}, 1)} }

func (i *inbox) handle(m mqtt.Message) {
	i.mu.Lock()
	i.got = append(i.got, fmt.Sprintf("%s q%d %s", m.Topic, m.QoS, m.Payload))
	i.mu.Unlock()
	select {
	case i.more <- struct{}{}:
	default:
	}
}

func (i *inbox) all() []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	return slices.Clone(i.got)
}

// wait waits for a message that ends in suffix, and returns all messages.
func (i *inbox) wait(t testing.TB, suffix string) []string {
	t.Helper()
	deadline := time.After(patience)
	for {
		all := i.all()
		if slices.ContainsFunc(all, func(s string) bool { return strings.HasSuffix(s, suffix) }) {
			return all
		}
		select {
		case <-i.more:
		case <-deadline:
			require.Failf(t, "message did not arrive", "want one that ends in %q, got %q", suffix, all)
		}
	}
}

// connect makes a client and waits until it is connected.
func connect(t testing.TB, s *server, cfg mqtt.Config) (mqtt.Client, *inbox) {
	t.Helper()
	in := newInbox()
	if cfg.Handler == nil {
		cfg.Handler = in.handle
	}
	if cfg.URL == "" {
		cfg.URL = s.url()
	}
	cfg.BackoffMax = time.Second
	c, err := mqtt.New(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close(patient(t)) })
	require.NoError(t, c.WaitConnected(patient(t)))
	return c, in
}
