package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/tripod-run/tripod/internal/cli"
)

const usage = "usage: wasmbench [FLAGS] calls | many N | first | peers PROGRAM IMAGE[,reuse]... | serve PROGRAM IMAGE=FILE... | echo NETNS"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "wasmbench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	n := &node{}
	socket := flag.String("socket", "/run/tripod/tripod.sock", "CRI socket of the node")
	flag.StringVar(&n.image, "image", "", "image of examples/wasm/faults-c; for first, any component, which is removed and pulled again")
	flag.StringVar(&n.logs, "log-dir", "/var/log/pods", "where the pods' logs are written")
	flag.StringVar(&n.netns, "netns-dir", "/run/tripod/netns", "where the node pins network namespaces")
	seconds := flag.Int("seconds", 3, "how long each measurement of calls takes")
	flag.Parse()
	if flag.Arg(0) == "echo" && flag.NArg() == 2 {
		return serveEcho(flag.Arg(1))
	}
	ctx = cli.Quiet(ctx)
	client, err := cli.Connect(ctx, *socket, time.Minute)
	if err != nil {
		return err
	}
	defer client.Close(context.WithoutCancel(ctx))
	n.client = client
	duration := time.Duration(*seconds) * time.Second
	switch {
	case flag.Arg(0) == "peers" && flag.NArg() > 2:
		return n.peers(ctx, flag.Arg(1), flag.Args()[2:], duration)
	case flag.Arg(0) == "serve" && flag.NArg() > 2:
		return n.serve(ctx, flag.Arg(1), flag.Args()[2:], duration)
	}
	if err := n.ensureImage(ctx); err != nil {
		return err
	}
	switch {
	case flag.Arg(0) == "calls" && flag.NArg() == 1:
		return n.calls(ctx, duration)
	case flag.Arg(0) == "many" && flag.NArg() == 2:
		var pods int
		if _, err := fmt.Sscan(flag.Arg(1), &pods); err != nil || pods < 1 {
			return fmt.Errorf("%q is not a number of pods", flag.Arg(1))
		}
		return n.many(ctx, pods)
	case flag.Arg(0) == "first" && flag.NArg() == 1:
		return n.first(ctx)
	default:
		return errors.New(usage)
	}
}
