//go:build race

package engine

// underRace: the race detector keeps memory of its own for each goroutine that has been.
const underRace = true
