// Command kubenode is a Kubernetes cluster of one node, for a person to try things on: the cluster of the tests, until a
// signal ends it. It runs inside a world that hack/testns makes; hack/kube.sh up starts it.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/kube"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "kubenode:", err)
		os.Exit(1)
	}
}

// run keeps the cluster until ctx ends. The file "kubeconfig" in the world's directory says that it is up.
func run(ctx context.Context) error {
	if harness.Dir() == "" {
		return errors.New("this is no world of its own; start it with hack/kube.sh up")
	}
	defer harness.CloseRegistry()
	c, err := kube.Start()
	if err != nil {
		return err
	}
	c.Daemon.Supervise() // as the unit file does; a person may kill it to see what happens
	up := filepath.Join(harness.Dir(), "kubeconfig")
	if err := os.Symlink(c.Kubeconfig(), up); err != nil {
		return errors.Join(err, c.Stop())
	}
	<-ctx.Done()
	return c.Stop()
}
