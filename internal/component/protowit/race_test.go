//go:build race

package protowit_test

// The race detector makes sync.Pool forget at random.
func init() { raceEnabled = true }
