package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "peers:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	switch {
	case len(args) == 2 && args[0] == "logind":
		return runLogind(ctx, args[1])
	case len(args) == 1 && args[0] == "device-plugin":
		return runDevicePlugin(ctx)
	case len(args) == 5 && args[0] == "dra":
		return runDRA(ctx, args[1], args[2], args[3], args[4])
	}
	return errors.New("wrong arguments; see doc.go")
}
