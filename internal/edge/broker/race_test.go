//go:build race

package broker_test

// overhead is how many times the race detector multiplies a process's memory.
const overhead = 4
