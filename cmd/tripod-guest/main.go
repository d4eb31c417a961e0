// tripod-guest runs the containers of a pod inside the pod's machine, for the handler "vm-oci" (docs/vm-oci.md). The
// machine's first process, tripod-init, starts it. It takes no arguments.
package main

import (
	"context"
	"log/slog"
	"os"
	"runtime"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux"
	"github.com/tripod-run/tripod/internal/sandbox/vm/guestnode"
)

var version = "dev" // set by the linker

func main() {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	guestnode.Run(version, func(ctx context.Context, root, runDir string, images *guestnode.Images) (guestnode.Backend, error) {
		backend, err := linux.Open(ctx, linux.Config{
			Root: root, RunDir: runDir, Runtime: "crun", CgroupDriver: "cgroupfs", Annotations: sandbox.AllowList{"*"},
			Tried: linux.DebianCrun, NoUserNamespaces: true, // package vm/oci refuses them
			ExecStarts: runtime.NumCPU(),
		}, linux.Services{Images: images, Logger: log})
		if err != nil {
			return nil, err
		}
		return armable(backend), nil
	}, log)
	os.Exit(1)
}
