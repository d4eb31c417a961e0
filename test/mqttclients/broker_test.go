package mqttclients

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/test/mosquitto"
	"github.com/tripod-run/tripod/test/until"
)

// server is a broker that a test may stop and start again with the same state, at the same address.
type server struct {
	port        int
	start, stop func(t testing.TB)
}

func (s *server) restart(t testing.TB) {
	s.stop(t)
	s.start(t)
}

// brokers are the brokers under test, by name. They serve MQTT over TCP or over WebSocket.
var brokers = []struct {
	name  string
	start func(t testing.TB, webSocket bool) *server
}{{"embedded", embedded}, {"mosquitto", mosquittoServer}}

// portOf returns the port of an address.
func portOf(t testing.TB, address string) int {
	a, err := net.ResolveTCPAddr("tcp", address)
	require.NoError(t, err)
	return a.Port
}

func embedded(t testing.TB, webSocket bool) *server {
	address := mosquitto.FreeAddress(t)
	s := &server{port: portOf(t, address)}
	cfg := broker.Config{Address: address, Path: filepath.Join(t.TempDir(), "broker.db")}
	if webSocket {
		cfg.Address, cfg.WebSocketAddress = "127.0.0.1:0", cfg.Address
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
	s.stop = func(t testing.TB) { require.NoError(t, b.Close(patient(t))) }
	s.start(t)
	t.Cleanup(func() { s.stop(t) })
	return s
}

// mosquittoServer starts mosquitto.
func mosquittoServer(t testing.TB, webSocket bool) *server {
	settings := "max_queued_messages 4096\nmax_inflight_messages 1024\n"
	if webSocket {
		// mosquitto 2.0.11 does not start without another listener
		settings += fmt.Sprintf("protocol websockets\nlistener 0 %s/socket\n", t.TempDir())
	}
	m := mosquitto.New(t, settings)
	return &server{port: portOf(t, m.Address), start: m.Start, stop: m.Stop}
}
