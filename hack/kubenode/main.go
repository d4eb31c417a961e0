// Command kubenode runs the one-node Kubernetes cluster of the tests until it gets a signal, so that you can try things
// by hand. It must run in an environment made by hack/testns; `hack/kube.sh up` starts kubenode.
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

// run keeps the cluster running until ctx ends. Once the cluster is ready, the environment's directory contains the
// file "kubeconfig".
func run(ctx context.Context) error {
	if harness.Dir() == "" {
		return errors.New("not in an environment of hack/testns; start it with hack/kube.sh up")
	}
	defer harness.CloseRegistry()
	c, err := kube.Start()
	if err != nil {
		return err
	}
	c.Daemon.Supervise() // restarts the daemon, as systemd would, because the user might kill it
	up := filepath.Join(harness.Dir(), "kubeconfig")
	if err := os.Symlink(c.Kubeconfig(), up); err != nil {
		return errors.Join(err, c.Stop())
	}
	<-ctx.Done()
	return c.Stop()
}
