package wasi

import (
	"errors"
	"time"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// Pollable is the resource "pollable" of wasi:io/poll. The first result reports whether the pollable is ready. If it is
// not, the second result is the time to check again, even if State.Wake has not been called. The zero time means that
// only a State.Wake can make the pollable ready.
type Pollable func() (ready bool, again time.Time)

// When returns a pollable for a condition. The code that makes the condition true must call State.Wake.
func When(ready func() bool) Pollable {
	return func() (bool, time.Time) { return ready(), time.Time{} }
}

// at returns a pollable that becomes ready at the time t.
func at(t time.Time) Pollable {
	return func() (bool, time.Time) { return !time.Now().Before(t), t }
}

var pollFuncs = map[string]Func{
	"[method]pollable.ready": func(c *Call) error {
		p, err := Get[Pollable](c.State, c.In.U32())
		if err != nil {
			return err
		}
		ready, _ := p()
		c.Out = wit.AppendBool(c.Out, ready)
		return nil
	},
	"[method]pollable.block": func(c *Call) error {
		p, err := Get[Pollable](c.State, c.In.U32())
		if err != nil {
			return err
		}
		return c.wait(c, p)
	},
	"poll": poll,
}

// poll waits until at least one pollable is ready, and returns the indices of the ready ones.
func poll(c *Call) error {
	polled := make([]Pollable, c.In.Len())
	for i := range polled {
		p, err := Get[Pollable](c.State, c.In.U32())
		if err != nil {
			return err
		}
		polled[i] = p
	}
	if len(polled) == 0 {
		return errors.New("poll of an empty list would wait forever")
	}
	var ready []uint32
	err := c.wait(c, func() (bool, time.Time) {
		ready = ready[:0]
		var soonest time.Time
		for i, p := range polled {
			ok, again := p()
			if ok {
				ready = append(ready, uint32(i))
			}
			if !again.IsZero() && (soonest.IsZero() || again.Before(soonest)) {
				soonest = again
			}
		}
		return len(ready) > 0, soonest
	})
	c.Out = wit.AppendLen(c.Out, len(ready))
	for _, i := range ready {
		c.Out = wit.AppendU32(c.Out, i)
	}
	return err
}

// epoch is when this program started. The monotonic clock counts from epoch, so that the clock does not reveal when the
// host started.
var epoch = time.Now()

var clockFuncs = map[string]Func{
	"now": func(c *Call) error {
		c.Out = wit.AppendU64(c.Out, uint64(time.Since(epoch)))
		return nil
	},
	"resolution": func(c *Call) error {
		c.Out = wit.AppendU64(c.Out, 1)
		return nil
	},
	"subscribe-instant": func(c *Call) error {
		c.Own(at(epoch.Add(duration(c.In.U64()))))
		return nil
	},
	"subscribe-duration": func(c *Call) error {
		c.Own(at(time.Now().Add(duration(c.In.U64()))))
		return nil
	},
}

// duration converts a guest's duration, which can exceed the range of time.Duration.
func duration(ns uint64) time.Duration { return time.Duration(min(ns, uint64(100*365*24*time.Hour))) }
