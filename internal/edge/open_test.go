package edge

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/internal/health"
	"github.com/tripod-run/tripod/test/until"
)

// TestPrivateDirC7: a front door whose directory is not the daemon's does not open. After a disk fault, every retry
// checks the directory again.
func TestPrivateDirC7(t *testing.T) {
	c := config.Default()
	c.Root = t.TempDir()
	log := slog.New(slog.DiscardHandler)
	foreign := errors.New("belongs to uid 1000")
	checks := make(chan error, 2)
	checks <- unix.EIO
	checks <- foreign
	board := health.NewBoard(log)
	s := Services{Logger: log, Health: board, PrivateDir: func(string) error {
		select {
		case err := <-checks:
			return err
		default:
			return foreign
		}
	}}
	door, err := Open(c, s)
	if err != nil {
		t.Fatalf("Open after a disk fault: got error %v, want a closed door that is retried", err)
	}
	if problems := board.Problems(); len(problems) != 1 || !errors.Is(problems[0].Err, unix.EIO) {
		t.Errorf("problems after a disk fault: got %v, want EIO", problems)
	}
	if err := door.open(); !errors.Is(err, foreign) {
		t.Errorf("the retry: got error %v, want %v", err, foreign)
	}
	if err := door.Close(); err != nil {
		t.Errorf("close of a door that never opened: %v", err)
	}
	if _, err := Open(c, s); !errors.Is(err, foreign) {
		t.Errorf("Open: got error %v, want %v", err, foreign)
	}
}

// TestHostedOrchestratorFails checks that broker and manager stay open while the orchestrator in the daemon cannot open,
// and that it opens once it can.
func TestHostedOrchestratorFails(t *testing.T) {
	c := config.Default()
	c.Root = t.TempDir()
	c.Edge.Enabled, c.Edge.Orchestrator, c.Edge.Wasm.Enabled = true, true, false
	c.Broker.Address, c.Orchestrator.Address = "127.0.0.1:0", "127.0.0.1:0"
	c.Orchestrator.Root = t.TempDir()
	if err := c.Complete(); err != nil {
		t.Fatal(err)
	}
	record := filepath.Join(c.Orchestrator.Root, "record.db")
	if err := os.WriteFile(record, []byte("damaged"), 0o600); err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	board := health.NewBoard(log)
	var locks atomic.Int32
	door, err := Open(c, Services{
		Connections: connlimit.NewGroup(log), Logger: log, Health: board,
		PrivateDir: func(dir string) error { return os.MkdirAll(dir, 0o700) },
		HoldDir: func(context.Context, string) (io.Closer, error) {
			locks.Add(1)
			return closer(func() { locks.Add(-1) }), nil
		},
	})
	if err != nil {
		t.Fatalf("Open with an orchestrator whose record is damaged: %v", err)
	}
	manager := door.manager
	until.Holds(t, "the problem is reported", func() bool {
		p := board.Problems()
		return len(p) == 1 && p[0].Condition == health.EdgeReady && p[0].Reason == health.StoreDamaged
	})
	if conn, err := net.Dial("tcp", strings.TrimPrefix(door.broker.URL(), "mqtt://")); err != nil {
		t.Errorf("the broker: %v", err)
	} else {
		conn.Close()
	}
	if err := os.Remove(record); err != nil {
		t.Fatal(err)
	}
	until.Holds(t, "the problem is solved", func() bool { return len(board.Problems()) == 0 })
	if door.manager != manager {
		t.Error("the manager was opened again")
	}
	if err := door.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	if n := locks.Load(); n != 0 {
		t.Errorf("%d locks are left", n)
	}
}

// TestHostedOrchestratorNeverOpens: a door that closes while the orchestrator waits for its directory has nothing to warn
// about.
func TestHostedOrchestratorNeverOpens(t *testing.T) {
	c := config.Default()
	c.Root = t.TempDir()
	c.Edge.Enabled, c.Edge.Orchestrator, c.Edge.Wasm.Enabled = true, true, false
	c.Broker.Address, c.Orchestrator.Address = "127.0.0.1:0", "127.0.0.1:0"
	if err := c.Complete(); err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	log := slog.New(slog.NewTextHandler(&text, nil))
	waits := make(chan struct{})
	door, err := Open(c, Services{
		Connections: connlimit.NewGroup(log), Logger: log, Health: health.NewBoard(log),
		PrivateDir: func(dir string) error { return os.MkdirAll(dir, 0o700) },
		HoldDir: func(ctx context.Context, _ string) (io.Closer, error) {
			close(waits)
			<-ctx.Done()
			return nil, ctx.Err()
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	<-waits
	if err := door.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	if strings.Contains(text.String(), "not closed properly") {
		t.Errorf("the log warns about an orchestrator that never opened:\n%s", text.String())
	}
}

// TestHostedOrchestratorUsesTheEdgesBroker: without orchestrator.broker, the orchestrator in the daemon connects to the
// edge's broker as the edge's user.
func TestHostedOrchestratorUsesTheEdgesBroker(t *testing.T) {
	password := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(password, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	hub, err := broker.New(broker.Config{
		Address: "127.0.0.1:0", Users: []broker.User{{Name: "node", PasswordFile: password, Realms: []string{"realm"}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { hub.Close(context.Background()) })
	c := config.Default()
	c.Root = t.TempDir()
	c.Edge.Enabled, c.Edge.Orchestrator, c.Edge.Wasm.Enabled = true, true, false
	c.Edge.Broker, c.Edge.User, c.Edge.PasswordFile = hub.URL(), "node", password
	c.Orchestrator.Address, c.Orchestrator.Root = "127.0.0.1:0", t.TempDir()
	if err := c.Complete(); err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	door, err := Open(c, Services{
		Connections: connlimit.NewGroup(log), Logger: log, Health: health.NewBoard(log),
		PrivateDir: func(dir string) error { return os.MkdirAll(dir, 0o700) },
		HoldDir:    func(context.Context, string) (io.Closer, error) { return closer(func() {}), nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { door.Close() })
	until.Holds(t, "manager and orchestrator are connected to the edge's broker", func() bool { return hub.Stats().Clients == 2 })
}

type closer func()

func (c closer) Close() error {
	c()
	return nil
}
