//go:build race

package engine

// underRace is set because the race detector keeps memory for each goroutine that has existed.
const underRace = true
