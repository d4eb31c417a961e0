package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/stream"
)

// stopGrace is the time that a container gets to end before it is killed, in seconds.
const stopGrace = 10

// foreground passes the output of a started container on until the container has ended, and our input to it if it has one. The
// error has the container's exit code, or is errLeft if the user leaves the container alone with the keys.
//
// The output comes from the log, which has it from the first byte: the CRI attaches only to a container that runs already.
func (a *App) foreground(ctx context.Context, client *Client, id string, container *runtimeapi.ContainerConfig) error {
	ending, cancel := context.WithCancel(context.WithoutCancel(ctx)) // an interrupt stops the container, not us
	defer cancel()
	go a.stopOnInterrupt(ctx, ending, client, id)
	following, leave := context.WithCancel(ending)
	defer leave()
	restore := func() {}
	if container.GetStdin() && container.GetTty() { // before the first output, which is for a raw terminal
		var err error
		if _, restore, err = a.makeRaw(); err != nil {
			return err
		}
	}
	left := false
	inputDone := make(chan struct{})
	go func() {
		defer close(inputDone)
		if !container.GetStdin() {
			return
		}
		switch err := a.input(following, client, id, container.GetTty()); {
		case errors.Is(err, errLeft):
			left = true
			leave()
		case err != nil && following.Err() == nil:
			fmt.Fprintf(a.Stderr, "tripod run: the container gets no input: %s\n", Explain(err))
		}
	}()
	logErr := a.logs(following, client, id, stream.LogOptions{Follow: true})
	leave()
	<-inputDone
	restore()
	if left {
		fmt.Fprintf(a.Stderr, "\ncontainer %s goes on: `tripod attach` returns to it, `tripod rmp` removes its pod\n", shortID(id))
		return errLeft
	}
	if logErr != nil {
		fmt.Fprintf(a.Stderr, "tripod run: %s\n", Explain(logErr))
	}
	return exitError(ending, client, id)
}

// input passes our input to a container. It returns nil if the container has ended.
func (a *App) input(ctx context.Context, client *Client, id string, tty bool) error {
	resp, err := client.Attach(ctx, &runtimeapi.AttachRequest{ContainerId: id, Stdin: true, Tty: tty})
	if status.Code(err) == codes.FailedPrecondition {
		return nil
	}
	if err != nil {
		return err
	}
	return a.stream(ctx, resp.GetUrl(), streamOptions{stdin: true, tty: tty, transport: "spdy", keys: attachKeys, inputOnly: true})
}

// stopOnInterrupt stops the container when ctx ends, and kills it at the next signal.
func (a *App) stopOnInterrupt(ctx, ending context.Context, client *Client, id string) {
	select {
	case <-ctx.Done():
	case <-ending.Done():
		return
	}
	again := make(chan os.Signal, 1)
	signal.Notify(again, unix.SIGINT, unix.SIGTERM)
	defer signal.Stop(again)
	for grace := int64(stopGrace); ; grace = 0 {
		go func() {
			if err := client.StopContainer(ending, id, grace); err != nil && ending.Err() == nil {
				fmt.Fprintf(a.Stderr, "tripod run: %s\n", Explain(err))
			}
		}()
		select {
		case <-again:
		case <-ending.Done():
			return
		}
	}
}

// exitError returns the exit code of an ended container as an ExitError, with text only if there is more to say than the code.
func exitError(ctx context.Context, client *Client, id string) error {
	resp, err := client.ContainerStatus(ctx, id, false)
	if err != nil {
		return err
	}
	ended := resp.GetStatus()
	exit := &ExitError{Code: int(ended.GetExitCode())}
	switch {
	case ended.GetState() != runtimeapi.ContainerState_CONTAINER_EXITED:
		return fmt.Errorf("container %s has not ended: %w", shortID(id), errdefs.ErrFailedPrecondition)
	case exit.Code == 0:
		return nil
	case ended.GetReason() != sandbox.ReasonError || ended.GetMessage() != "":
		exit.Err = errors.New(endOf(ended))
	}
	return exit
}
