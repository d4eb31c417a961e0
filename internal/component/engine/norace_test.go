//go:build !race && !asan

package engine

const underSanitizer = false
