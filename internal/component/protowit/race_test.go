//go:build race

package protowit_test

// raceEnabled is set because the race detector makes sync.Pool drop items at random.
func init() { raceEnabled = true }
