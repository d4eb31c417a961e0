package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/cli"
)

// profiledBytes is the runtime's rate of samples for heap profiles, for [debug]. Without them, the program is 1 MiB smaller.
var profiledBytes = runtime.MemProfileRate

func main() {
	runtime.MemProfileRate = 0
	os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run runs the program with the given arguments and streams, and returns the exit code.
func run(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := newRoot(stdin, stdout, stderr)
	root.SetArgs(args)
	command, err := root.ExecuteContextC(context.Background())
	if err == nil {
		return 0
	}
	if text := cli.Explain(err); !isSilent(err) {
		fmt.Fprintf(stderr, "%s: %s\n", command.CommandPath(), text)
	}
	return cli.ExitCode(err)
}

// isSilent reports whether err is only the exit code of a program in a container. The program has printed its own
// error.
func isSilent(err error) bool {
	var exit *cli.ExitError
	return errors.As(err, &exit) && exit.Err == nil
}

func newRoot(stdin io.Reader, stdout, stderr io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use:           "tripod",
		Short:         "A Kubernetes node runtime: CRI in front, several kinds of isolation behind",
		SilenceErrors: true,
		SilenceUsage:  true,
		Version:       version,
	}
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.AddGroup(&cobra.Group{ID: groupNode, Title: "The node:"},
		&cobra.Group{ID: cli.Group, Title: "Pods, containers and images, over the CRI socket:"},
		&cobra.Group{ID: groupWasm, Title: "Wasm components:"},
		&cobra.Group{ID: groupEdge, Title: "Modules, over MQTT:"})
	app := &cli.App{Stdin: stdin, Stdout: stdout, Stderr: stderr}
	for _, c := range append([]*cobra.Command{
		daemonCommand(), sessionsCommand(), checkCommand(app), configCommand(), diagCommand(), versionCommand(app), benchCommand(), manCommand(),
	}, testCommands()...) {
		c.GroupID = groupNode
		root.AddCommand(c)
	}
	for _, c := range app.Commands() {
		interruptible(c)
		root.AddCommand(c)
	}
	for _, c := range []*cobra.Command{app.WITCommand(), app.ComponentCommand(), app.PushCommand(), app.CallCommand()} {
		for _, runs := range append(c.Commands(), c) {
			if runs.RunE != nil {
				interruptible(runs)
			}
		}
		c.GroupID = groupWasm
		root.AddCommand(c)
	}
	keyvalue := keyvalueCommand()
	keyvalue.GroupID = groupWasm
	root.AddCommand(keyvalue)
	machines := machineCommand(app)
	machines.GroupID = groupNode
	root.AddCommand(machines)
	orchestrator := orchestratorCommand()
	orchestrator.GroupID = groupEdge
	root.AddCommand(orchestrator)
	edge := app.EdgeCommand(interruptible)
	edge.GroupID = groupEdge
	root.AddCommand(edge)
	root.AddCommand(elsewhereCommands()...)
	return root
}

const (
	groupNode = "node"
	groupWasm = "wasm"
	groupEdge = "edge"
)

// interrupted is the signal that has ended a command, as the cause of its context's end.
type interrupted unix.Signal

func (i interrupted) Error() string { return unix.Signal(i).String() + " signal received" }

// interruptible makes SIGINT and SIGTERM cancel a client command's context. After such a signal, the program ends with
// the exit code that shells expect, or with that of a program in a container. A second signal kills the process.
func interruptible(c *cobra.Command) {
	run := c.RunE
	c.RunE = func(c *cobra.Command, args []string) error {
		ctx, end := context.WithCancelCause(c.Context())
		defer end(nil)
		signals := make(chan os.Signal, 1)
		signal.Notify(signals, unix.SIGINT, unix.SIGTERM)
		go func() {
			defer signal.Stop(signals)
			select {
			case s := <-signals:
				end(interrupted(s.(unix.Signal)))
			case <-ctx.Done():
			}
		}()
		c.SetContext(ctx)
		err := run(c, args)
		if by, ok := errors.AsType[interrupted](context.Cause(ctx)); err != nil && ok && !isSilent(err) {
			return &cli.ExitError{Code: 128 + int(by)}
		}
		return err
	}
}
