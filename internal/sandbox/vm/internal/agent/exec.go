package agent

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
)

const copyBuffer = 32 << 10

// Command is a program to run in a guest.
type Command struct {
	sandbox.ExecRequest
	// Env is added to PATH, HOME, USER and, on a terminal, TERM: entries are KEY=VALUE.
	Env []string
	// Dir is the working directory; "" is the user's home.
	Dir string
	// User is a name or a number, with ":" and a group if need be, as the guest knows them; "" is root.
	User string
}

// Exec runs a program in the guest and gives its exit code: 128+n when signal n ended it. A program that the guest does not
// have is an errdefs.ErrInvalidArgument. It is killed, with all that is in its session, when ctx ends. When it has ended and a
// child holds its stdio, Exec returns after a second. After Exec has returned a read of cmd.Stdin, and if ctx has ended a write
// of output, may still be under way.
func (a *Agent) Exec(ctx context.Context, cmd Command) (int32, error) {
	if len(cmd.Cmd) == 0 {
		return 0, fmt.Errorf("exec: no program is named: %w", errdefs.ErrInvalidArgument)
	}
	request := wire.Exec{
		Args: cmd.Cmd, Env: cmd.Env, Dir: cmd.Dir, User: cmd.User, TTY: cmd.TTY,
		Stdin: cmd.Stdin != nil, Stdout: cmd.Stdout != nil || cmd.TTY, Stderr: cmd.Stderr != nil && !cmd.TTY,
	}
	c, err := a.open(ctx, wire.OpExec, request.Append(nil))
	if err != nil {
		return 0, fmt.Errorf("exec: %w", err)
	}
	defer c.abandon()
	var output sync.WaitGroup
	for channel, to := range map[byte]io.Writer{wire.ChannelOut: cmd.Stdout, wire.ChannelErr: cmd.Stderr} {
		if to != nil {
			output.Go(func() { c.copyOut(channel, to) })
		}
	}
	if cmd.Stdout == nil && cmd.TTY {
		output.Go(func() { c.copyOut(wire.ChannelOut, io.Discard) })
	}
	if cmd.Stdin != nil {
		go c.copyIn(cmd.Stdin)
	}
	if cmd.TTY && cmd.Resize != nil {
		go c.followSize(cmd.Resize)
	}
	if err := c.wait(ctx); err != nil {
		return 0, fmt.Errorf("exec: %w", err)
	}
	drained := make(chan struct{})
	go func() { output.Wait(); close(drained) }()
	select {
	case <-drained: // all output has arrived and waits for its reader
	case <-ctx.Done():
		return 0, fmt.Errorf("exec: %w", context.Cause(ctx))
	}
	return c.result.Exit, nil
}

// copyOut copies a channel to its end. A reader who is gone must not stop the program.
func (c *call) copyOut(channel byte, to io.Writer) {
	buf := make([]byte, copyBuffer)
	for {
		n, err := c.Read(channel, buf, nil)
		if n > 0 {
			if _, err := to.Write(buf[:n]); err != nil {
				to = io.Discard
			}
		}
		if err != nil {
			return
		}
	}
}

// copyIn copies what from has, and its end, while the program runs.
func (c *call) copyIn(from io.Reader) {
	buf := make([]byte, copyBuffer)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if _, err := c.Write(wire.ChannelIn, buf[:n], nil); err != nil {
				return
			}
		}
		if err != nil {
			c.Stream.Close(wire.ChannelIn)
			return
		}
	}
}

func (c *call) followSize(sizes <-chan sandbox.TermSize) {
	for {
		select {
		case size, ok := <-sizes:
			if !ok {
				return
			}
			payload := binary.BigEndian.AppendUint16(nil, size.Width)
			if !c.Send(nil, wire.KindResize, binary.BigEndian.AppendUint16(payload, size.Height)) {
				return
			}
		case <-c.Done():
			return
		}
	}
}
