package workerapi

import "github.com/tripod-run/tripod/internal/fdpass"

// Error is an error that came over the wire: its text and, by errors.Is, its class.
type Error = fdpass.Error
