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
	// Env holds entries of the form KEY=VALUE, in addition to PATH, HOME, USER and, on a terminal, TERM.
	Env []string
	// Dir is the working directory; "" is the user's home directory.
	Dir string
	// User is a user name or ID in the guest, optionally followed by ":" and a group name or ID; "" is root.
	User string
}

// Exec runs a program in the guest. It returns the program's exit code, or 128+n if signal n killed the program. If the
// guest does not have the program, the error is errdefs.ErrInvalidArgument. When ctx ends, the program and all
// processes in its session are killed. If a child process keeps the program's stdio open after the program has ended,
// Exec returns after a second. After Exec has returned, a read from cmd.Stdin may still be under way. If ctx has ended,
// a write to cmd.Stdout or cmd.Stderr may still be under way, too.
func (a *Agent) Exec(ctx context.Context, cmd Command) (int32, error) {
	if len(cmd.Cmd) == 0 {
		return 0, fmt.Errorf("exec: the command is empty: %w", errdefs.ErrInvalidArgument)
	}
	request := wire.Exec{
		Args: cmd.Cmd, Env: cmd.Env, Dir: cmd.Dir, User: cmd.User, TTY: cmd.TTY,
		Stdin: cmd.Stdin != nil, Stdout: cmd.Stdout != nil || cmd.TTY, Stderr: cmd.Stderr != nil && !cmd.TTY,
	}
	code, err := a.Stream(ctx, wire.OpExec, request.Append(nil), cmd.ExecRequest)
	if err != nil {
		return 0, fmt.Errorf("exec: %w", err)
	}
	return code, nil
}

// Stream runs an operation with the given input, output and terminal, and returns its exit code. It ends the operation
// when ctx ends. The deadlines and the reads and writes that may still be under way are those of Exec.
func (a *Agent) Stream(ctx context.Context, op wire.Op, request []byte, with sandbox.ExecRequest) (int32, error) {
	c, err := a.open(ctx, op, request)
	if err != nil {
		return 0, err
	}
	defer c.stop()
	var output sync.WaitGroup
	for channel, to := range map[byte]io.Writer{wire.ChannelOut: with.Stdout, wire.ChannelErr: with.Stderr} {
		if to != nil {
			output.Go(func() { c.copyOut(channel, to) })
		}
	}
	if with.Stdout == nil && with.TTY {
		output.Go(func() { c.copyOut(wire.ChannelOut, io.Discard) })
	}
	if with.Stdin != nil {
		go c.copyIn(with.Stdin)
	}
	if with.TTY && with.Resize != nil {
		go c.followSize(with.Resize)
	}
	if err := c.wait(ctx); err != nil {
		return 0, err
	}
	drained := make(chan struct{})
	go func() { output.Wait(); close(drained) }()
	select {
	case <-drained:
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
	return c.result.Exit, nil
}

// copyOut copies a channel to a writer until the channel ends. A failing writer does not stop the program.
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

// copyIn copies from a reader to the program's stdin and closes stdin when there is nothing more to read.
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
