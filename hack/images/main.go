package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/tripod-run/tripod/test/harness/registry"
	"github.com/tripod-run/tripod/test/harness/testns"
)

const usage = "usage: images [build | list | serve ADDR | push ADDR | hosts ADDR DIR | guest DIR INIT PROGRAM]"

func main() {
	testns.Reenter()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, store("build/images"), os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1)
	}
}

// run runs the command in args. The working directory must be the root of the repository.
func run(ctx context.Context, s store, args []string) error {
	if len(args) == 0 {
		args = []string{"build"}
	}
	if args[0] == "guest" && len(args) == 4 {
		return s.buildGuest(ctx, args[1], args[2], args[3])
	}
	if _, err := os.Stat(s.path("key")); args[0] == "build" || err != nil && args[0] != "hosts" && args[0] != "fill" {
		if err := s.build(ctx); err != nil {
			return err
		}
	}
	switch cmd := fmt.Sprint(args[0], "/", len(args)-1); cmd {
	case "build/0":
		return nil
	case "fill/0": // called by build, in a network namespace
		return s.fill(ctx)
	case "list/0":
		data, err := os.ReadFile(s.path("images.txt"))
		fmt.Print(string(data))
		return err
	case "push/1":
		return s.push(ctx, args[1])
	case "serve/1":
		return s.serve(ctx, args[1])
	case "hosts/2":
		return registry.WriteHosts(args[2], args[1])
	}
	return errors.New(usage)
}

// serve serves a copy of the registry's storage until ctx ends.
func (s store) serve(ctx context.Context, addr string) error {
	dir, err := os.MkdirTemp("", "tripod-registry-") // below TMPDIR, which a test environment removes
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	storage := dir + "/registry"
	if err := os.CopyFS(storage, os.DirFS(s.path("registry"))); err != nil {
		return err
	}
	srv, err := registry.Start(ctx, storage, addr)
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "registry on %s\n", srv.Addr)
	defer context.AfterFunc(ctx, func() { _ = srv.Stop() })()
	err = srv.Wait()
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("docker-registry ended: %w", err)
}
