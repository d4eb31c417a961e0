package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

// limit is the timeout of each step.
const limit = time.Minute

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "edgebench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	broker := flag.String("broker", "mqtt://127.0.0.1:1883", "MQTT broker")
	dir := flag.String("modules", "examples/edge", "directory of the example modules, below one of the node's edge.module_roots")
	runtime := flag.String("runtime", "wasm", "runtime to measure")
	messages := flag.Int("messages", 5000, "messages of each turn")
	turns := flag.Int("turns", 5, "turns of the rates")
	rounds := flag.Int("rounds", 50, "modules that are created one after the other")
	many := flag.Int("many", 128, "modules that run at a time")
	flag.Parse()
	modules, err := filepath.Abs(*dir)
	if err != nil {
		return err
	}
	b, err := dial(ctx, *broker)
	if err != nil {
		return err
	}
	defer b.close()
	b.dir, b.runtime = modules, *runtime
	for _, measure := range []func() error{
		func() error { return b.latency(ctx, *messages) },
		func() error { return b.rates(ctx, *broker, *messages, *turns) },
		func() error { return b.creation(ctx, *rounds) },
		func() error { return b.crowd(ctx, *many) },
	} {
		if err := measure(); err != nil {
			return err
		}
	}
	return nil
}
