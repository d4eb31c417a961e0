package main

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// rate calls Echo from the given number of goroutines for the given duration, and returns the number of answers per
// second.
func rate(ctx context.Context, c *conn, frame []byte, concurrency int, duration time.Duration) (float64, error) {
	return rateOf(func(int) error { return c.echo(ctx, frame) }, concurrency, duration)
}

// rateOf is rate for any call. It gets the number of the goroutine.
func rateOf(call func(i int) error, concurrency int, duration time.Duration) (float64, error) {
	var answers atomic.Int64
	var wg sync.WaitGroup
	var first sync.Once
	var failure error
	started := time.Now()
	for i := range concurrency {
		wg.Go(func() {
			for time.Since(started) < duration {
				if err := call(i); err != nil {
					first.Do(func() { failure = err })
					return
				}
				answers.Add(1)
			}
		})
	}
	wg.Wait()
	return float64(answers.Load()) / time.Since(started).Seconds(), failure
}

// latencies calls Echo perSecond times a second, without waiting for earlier answers, and returns how long the calls
// took, sorted.
func latencies(ctx context.Context, c *conn, frame []byte, perSecond int, duration time.Duration) ([]time.Duration, error) {
	var mu sync.Mutex
	var took []time.Duration
	var failures []error
	var wg sync.WaitGroup
	tick := time.NewTicker(time.Second / time.Duration(perSecond))
	defer tick.Stop()
	for started := time.Now(); time.Since(started) < duration; {
		start := <-tick.C
		wg.Go(func() {
			err := c.echo(ctx, frame)
			mu.Lock()
			defer mu.Unlock()
			took, failures = append(took, time.Since(start)), append(failures, err)
		})
	}
	wg.Wait()
	slices.Sort(took)
	return took, errors.Join(failures...)
}

// quantile returns the quantile q of sorted values, by nearest rank.
func quantile(sorted []time.Duration, q float64) time.Duration {
	return sorted[min(int(float64(len(sorted))*q), len(sorted)-1)]
}

// median returns the median of values.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}
