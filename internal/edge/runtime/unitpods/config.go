package unitpods

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/node"
)

// Type is the runtime_type that the orchestrator sees.
const Type = "tripod/wasm"

// APIs are the APIs that modules can use.
var APIs = []string{"wasm", "wasi", "wasi:unstable", "wasi:snapshot_preview1", "wasi:cli@0.2", "channels", "tripod:edge/channels@0.1.0",
	"stdin", "stdout"}

// Node is the part of the node that the runtime uses; *node.Node implements it.
type Node interface {
	RunSandbox(ctx context.Context, config *runtimeapi.PodSandboxConfig, handler string) (string, error)
	StopSandbox(ctx context.Context, id string) error
	RemoveSandbox(ctx context.Context, id string) error
	CreateContainer(ctx context.Context, podID string, config *runtimeapi.ContainerConfig) (string, error)
	StartContainer(ctx context.Context, id string) error
	StopContainer(ctx context.Context, id string, grace time.Duration) error
	Channels(ctx context.Context, id string) (conn net.Conn, group string, err error)
	ReopenLog(ctx context.Context, id string) error
	ContainerStats(ctx context.Context, id string) (*runtimeapi.ContainerStats, error)
	Pods() []*node.Pod
	Subscribe() *node.Subscription
}

// Images is the part of the image store that the runtime uses; wasm.Images implements it.
type Images interface {
	// ImportFile makes an image from a file. The image's name begins with image.LocalPrefix.
	ImportFile(ctx context.Context, file *os.File) (image.Image, error)
	Get(ctx context.Context, refOrID string) (image.Image, error)
	List(ctx context.Context) ([]image.Image, error)
	Pull(ctx context.Context, ref string, opts image.PullOptions) (image.Image, error)
	Remove(ctx context.Context, refOrID string) error
}

// Config configures a Runtime. Node, Images, Name, UUID and LogDir are required.
type Config struct {
	Name string
	UUID string
	// MaxModules is the maximum number of modules at a time; channel.MaxModules by default.
	MaxModules int
	// Handler is the RuntimeClass handler of the modules' pods; "wasm" by default.
	Handler string
	Node    Node
	Images  Images
	// LogDir is the directory of the modules' logs. No other runtime may use this directory. If it is missing, it is
	// created.
	LogDir string
	// LogBytes is the size at which a module's log is rotated; 8 MiB by default. If the manager does not keep up, the log
	// is rotated at twice that size, and the unread rest of the old file is dropped.
	LogBytes int64
	// Modules' files must be below one of ModuleRoots, and directories that modules use must be below one of DirRoots. A
	// relative path is looked up in each root in turn.
	ModuleRoots, DirRoots []string
	Topics                wire.Topics
	// ImageIdle is how long the image of a file is kept while no module uses it; 10 minutes by default.
	ImageIdle time.Duration
	// OrphanAge is how long pods without a module are kept after Start, so that Adopt can find them; a minute by
	// default.
	OrphanAge time.Duration
	Logger    *slog.Logger
}

const minLogBytes = 4 << 10

func (c *Config) setDefaults() error {
	c.MaxModules = cmp.Or(c.MaxModules, channel.MaxModules)
	c.Handler = cmp.Or(c.Handler, "wasm")
	c.LogBytes = cmp.Or(c.LogBytes, 8<<20)
	c.ImageIdle = cmp.Or(c.ImageIdle, 10*time.Minute)
	c.OrphanAge = cmp.Or(c.OrphanAge, time.Minute)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	switch {
	case c.Node == nil || c.Images == nil:
		return fmt.Errorf("runtime %q: no node or image store: %w", c.Name, errdefs.ErrInvalidArgument)
	case c.Name == "" || c.UUID == "":
		return fmt.Errorf("runtime %q (uuid %q) needs a name and a uuid: %w", c.Name, c.UUID, errdefs.ErrInvalidArgument)
	case c.MaxModules < 1 || c.MaxModules > channel.MaxModules:
		return fmt.Errorf("runtime %q: %d modules at a time: want 1 to %d: %w", c.Name, c.MaxModules, channel.MaxModules,
			errdefs.ErrInvalidArgument)
	case c.LogBytes < minLogBytes:
		return fmt.Errorf("runtime %q: logs of %d bytes: want %d or more: %w", c.Name, c.LogBytes, minLogBytes, errdefs.ErrInvalidArgument)
	case !filepath.IsAbs(c.LogDir):
		return fmt.Errorf("runtime %q: the log directory %q is not an absolute path: %w", c.Name, c.LogDir, errdefs.ErrInvalidArgument)
	}
	return nil
}
