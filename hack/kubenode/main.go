// Command kubenode runs the Kubernetes cluster of the tests, with one node or as many as its argument says, until it gets
// a signal, so that you can try things by hand. It must run in an environment made by hack/testns; `hack/kube.sh up`
// starts kubenode.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/kube"
	"github.com/tripod-run/tripod/test/harness/testns"
)

func main() {
	testns.Reenter() // as the first process of another node
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	nodes := 1
	if len(os.Args) > 1 {
		var err error
		if nodes, err = strconv.Atoi(os.Args[1]); err != nil || nodes < 1 || len(os.Args) > 2 {
			fmt.Fprintln(os.Stderr, "usage: kubenode [NODES]")
			os.Exit(2)
		}
	}
	if err := run(ctx, nodes); err != nil {
		fmt.Fprintln(os.Stderr, "kubenode:", err)
		os.Exit(1)
	}
}

// run keeps the cluster running until ctx ends. Once the cluster is ready, the environment's directory contains the
// file "kubeconfig".
func run(ctx context.Context, nodes int) error {
	if harness.Dir() == "" {
		return errors.New("not in an environment of hack/testns; start it with hack/kube.sh up")
	}
	defer harness.CloseRegistry()
	c, err := kube.Start(nodes)
	if err != nil {
		return err
	}
	for _, n := range c.Nodes {
		n.Daemon.Supervise() // restarts the daemon, as systemd would, because the user might kill it
	}
	up := filepath.Join(harness.Dir(), "kubeconfig")
	if err := os.Symlink(c.Kubeconfig(), up); err != nil {
		return errors.Join(err, c.Stop())
	}
	<-ctx.Done()
	return c.Stop()
}
