package edge

import (
	"errors"
	"log/slog"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/health"
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
