package guestagent

import (
	"errors"
	"io"
	"strconv"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/identity"
)

// Renew gives a guest that has just continued from a template a clock and random numbers of its own. The first argument is the
// node's time in nanoseconds since 1970, and the input has identity.SeedSize random bytes.
func Renew(args []string, in io.Reader) error {
	received := time.Now()
	if len(args) != 1 {
		return errors.New("usage: tripod-agent renew NANOSECONDS <SEED")
	}
	now, err := strconv.ParseInt(args[0], 10, 64)
	if err != nil {
		return err
	}
	seed := make([]byte, identity.SeedSize)
	if _, err := io.ReadFull(in, seed); err != nil {
		return err
	}
	return errors.Join(identity.Reseed(seed), identity.SetClock(time.Unix(0, now).Sub(received)))
}
