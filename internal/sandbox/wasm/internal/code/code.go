// Package code compiles components, and keeps the machine code for the workers.
//
//	images ─▶ Precompiler ─┐                    ┌─▶ layers: signed code in the image, if the node accepts its key
//	                       ├─▶ Cache ─▶ flight ─┤
//	pods ──▶ Catalog ──────┘     │              └─▶ queue ─▶ tripod-wasm compile (a child), quickly or with optimisation
//	                             ▼
//	                        <Dir>/<digest>/<engine>.{code,json}
//
// Code is shared by all pods and images that may use it. Nothing here decides which worker loads it.
package code

import (
	"context"
	"log/slog"
	"strings"
	"time"

	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/artifact"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/launch"
)

// Config configures a cache.
type Config struct {
	// Dir holds the compiled code, and must survive a reboot.
	Dir     string
	Program launch.Program
	// Timeout (2 minutes by default) and Memory (bytes; 2 GiB by default) bound the compilation of one component. Parallel bounds
	// the number of concurrent ones; 0 means a number that suits the host's processors and memory.
	Timeout  time.Duration
	Memory   int64
	Parallel int
	// If Quick is set, pods with a component of more than QuickAbove bytes begin with quick code, unless they demand optimised
	// code. 0 means the usual QuickAbove.
	Quick      bool
	QuickAbove int64
	// Rules say which compiled code in images is used.
	Rules  []Rule
	Images Images
	Logger *slog.Logger
}

// QuickAbove is the usual value of Config.QuickAbove. Smaller components are compiled in a second or two anyway.
const QuickAbove = 2 << 20

// format is the version of the file formats.
const format ledger.Format = 1

// Images is the part of the image store that a cache and a catalogue use.
type Images interface {
	artifact.Blobs
	// Component returns the component in an image.
	Component(ctx context.Context, imageID string) (*artifact.Artifact, error)
	// Get returns the image with the given ID or reference.
	Get(ctx context.Context, refOrID string) (image.Image, error)
	// Hold keeps the blobs of an image, even if the image is removed, until Unhold is called with the same key. Holds
	// returns all keys, including those of the store's other users.
	Hold(ctx context.Context, key, imageID string) error
	Unhold(ctx context.Context, key string) error
	Holds(ctx context.Context) ([]string, error)
}

// shortName returns the first half of a SHA-256 digest as a file name. Half a digest is unique enough.
func shortName(digest string) string {
	digest = strings.TrimPrefix(digest, "sha256:")
	return digest[:min(len(digest), 32)]
}
