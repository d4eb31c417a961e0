//go:build race || asan

package engine

// underSanitizer is set because the race detector keeps memory for each goroutine that has existed, and the address
// sanitizer keeps freed memory.
const underSanitizer = true
