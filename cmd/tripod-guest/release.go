//go:build !failpoints

package main

import "github.com/tripod-run/tripod/internal/sandbox/vm/guestnode"

// armable returns the backend, because a release has no fail points.
func armable(b guestnode.Backend) guestnode.Backend { return b }
