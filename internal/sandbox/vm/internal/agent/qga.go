package agent

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

const (
	// qgaSync is how long a qemu-guest-agent may take to say that it is there.
	qgaSync = 3 * time.Second
	// qgaPoll and qgaPollMax are the first and the last pause between two looks whether a program has ended: there is no event.
	qgaPoll, qgaPollMax = 10 * time.Millisecond, 500 * time.Millisecond
	// qgaInput is the most that a program can be given on its stdin, which goes with the request.
	qgaInput = 1 << 20
	// qgaLine is the longest answer: two outputs of 16 MiB, the agent's own limit, in base64.
	qgaLine = 48 << 20
	// qgaFarewell is how long the end of a program may take that is not wanted any more.
	qgaFarewell = 5 * time.Second
)

// QGA is a guest's qemu-guest-agent, there or not. Its socket takes one client at a time, so it is held for one question only:
// use one QGA for a machine, by as many callers as there are.
type QGA struct {
	socket string
	busy   chan struct{}
}

// OpenQGA is for machine.QGASocket of a machine. It connects when it is asked something.
func OpenQGA(socket string) *QGA { return &QGA{socket: socket, busy: make(chan struct{}, 1)} }

// Ping asks whether the agent is there: errdefs.ErrUnavailable when it has not answered by the end of ctx or in 3 seconds.
func (q *QGA) Ping(ctx context.Context) error {
	return q.ask(ctx, "guest-ping", struct{}{}, &struct{}{})
}

// ExecSync runs a program in the guest, as Agent.Exec does, with less: its output comes when it has ended, its input is read
// before it starts and has at most 1 MiB, and there is no terminal and no user other than root (errdefs.ErrNotImplemented).
// At the end of ctx the program is killed, not what it started.
func (q *QGA) ExecSync(ctx context.Context, cmd Command) (int32, error) {
	request, err := qgaRequest(cmd)
	if err != nil {
		return 0, fmt.Errorf("exec by qemu-guest-agent: %w", err)
	}
	var started struct{ Pid int64 }
	if err := q.ask(ctx, "guest-exec", request, &started); err != nil {
		return 0, fmt.Errorf("exec by qemu-guest-agent: %w", err)
	}
	status, err := q.await(ctx, started.Pid)
	if err != nil {
		return 0, fmt.Errorf("exec by qemu-guest-agent: %w", err)
	}
	for _, out := range []struct {
		to   io.Writer
		data []byte
		cut  bool
	}{{cmd.Stdout, status.Out, status.OutCut}, {cmd.Stderr, status.Err, status.ErrCut}} {
		if out.to == nil {
			continue
		}
		if out.cut {
			out.data = append(out.data, "\n[output cut by qemu-guest-agent]\n"...)
		}
		_, _ = out.to.Write(out.data) // a reader who is gone changes nothing any more
	}
	if status.Signal > 0 {
		return 128 + status.Signal, nil
	}
	return status.ExitCode, nil
}

func qgaRequest(cmd Command) (map[string]any, error) {
	args := cmd.Cmd
	switch {
	case len(args) == 0:
		return nil, fmt.Errorf("no program is named: %w", errdefs.ErrInvalidArgument)
	case cmd.TTY:
		return nil, fmt.Errorf("it has no terminals; tripod-agent in the guest has: %w", errdefs.ErrNotImplemented)
	case cmd.User != "" && cmd.User != "root" && cmd.User != "0":
		return nil, fmt.Errorf("it runs programs as root only, not as %q; tripod-agent in the guest can: %w", cmd.User, errdefs.ErrNotImplemented)
	}
	if cmd.Dir != "" {
		args = append([]string{"/bin/sh", "-c", `cd "$0" && exec "$@"`, cmd.Dir}, args...)
	}
	request := map[string]any{"path": args[0], "arg": args[1:], "capture-output": true}
	if len(cmd.Env) > 0 {
		request["env"] = append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"}, cmd.Env...)
	}
	if cmd.Stdin != nil {
		input, err := io.ReadAll(io.LimitReader(cmd.Stdin, qgaInput+1))
		if err != nil {
			return nil, err
		}
		if len(input) > qgaInput {
			return nil, fmt.Errorf("its programs take %d bytes of input at most; tripod-agent in the guest takes any: %w", qgaInput, errdefs.ErrNotImplemented)
		}
		request["input-data"] = input // in base64
	}
	return request, nil
}

// qgaStatus is the answer of guest-exec-status.
type qgaStatus struct {
	Exited   bool   `json:"exited"`
	ExitCode int32  `json:"exitcode"`
	Signal   int32  `json:"signal"`
	Out      []byte `json:"out-data"`
	Err      []byte `json:"err-data"`
	OutCut   bool   `json:"out-truncated"`
	ErrCut   bool   `json:"err-truncated"`
}

// qgaConn is a connection while it is ours.
type qgaConn struct {
	agent *QGA
	conn  net.Conn
	in    *bufio.Reader
	stop  func() bool
}

// connect waits for its turn, connects, and finds out whether somebody answers.
func (q *QGA) connect(ctx context.Context) (*qgaConn, error) {
	select {
	case q.busy <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	c := &qgaConn{agent: q}
	conn, err := machine.Dial(ctx, q.socket)
	if err != nil {
		<-q.busy
		return nil, err
	}
	c.conn, c.in = conn, bufio.NewReader(conn)
	limited, cancel := context.WithTimeout(ctx, qgaSync)
	defer cancel()
	c.until(limited)
	err = c.sync()
	c.until(ctx)
	if err != nil {
		c.close()
		return nil, fmt.Errorf("no qemu-guest-agent answers in the guest: %w (%w)", err, errdefs.ErrUnavailable)
	}
	return c, nil
}

// until has reads and writes fail when ctx ends.
func (c *qgaConn) until(ctx context.Context) {
	if c.stop != nil {
		c.stop()
	}
	_ = c.conn.SetDeadline(time.Time{})
	c.stop = context.AfterFunc(ctx, func() { _ = c.conn.SetDeadline(time.Unix(1, 0)) })
}

func (c *qgaConn) close() {
	c.stop()
	_ = c.conn.Close()
	<-c.agent.busy
}

// sync discards what is left of earlier requests: the answer follows a byte that no JSON text contains.
func (c *qgaConn) sync() error {
	var number [4]byte
	_, _ = rand.Read(number[:]) // never fails
	id := int64(binary.BigEndian.Uint32(number[:]))
	_, err := c.conn.Write(append([]byte{0xff}, `{"execute":"guest-sync-delimited","arguments":{"id":`+strconv.FormatInt(id, 10)+"}}\n"...))
	if err != nil {
		return err
	}
	for {
		if _, err := c.line(0xff); err != nil {
			return err
		}
		line, err := c.line('\n')
		if err != nil {
			return err
		}
		var answer struct{ Return int64 }
		if json.Unmarshal(line, &answer) == nil && answer.Return == id {
			return nil
		}
	}
}

// line reads to the delimiter, within limits.
func (c *qgaConn) line(end byte) ([]byte, error) {
	var line []byte
	for {
		piece, err := c.in.ReadSlice(end)
		line = append(line, piece...)
		switch {
		case err == nil:
			return bytes.TrimSuffix(line, []byte{end}), nil
		case !errors.Is(err, bufio.ErrBufferFull):
			return nil, err
		case len(line) > qgaLine:
			return nil, fmt.Errorf("its answer is longer than %d MiB: %w", qgaLine>>20, errdefs.ErrResourceExhausted)
		}
	}
}

func (c *qgaConn) ask(command string, arguments, answer any) error {
	request, err := json.Marshal(map[string]any{"execute": command, "arguments": arguments})
	if err != nil {
		return err
	}
	if _, err := c.conn.Write(append(request, '\n')); err != nil {
		return err
	}
	line, err := c.line('\n')
	if err != nil {
		return err
	}
	var reply struct {
		Return json.RawMessage
		Error  *struct{ Class, Desc string }
	}
	if err := json.Unmarshal(line, &reply); err != nil {
		return fmt.Errorf("its answer is no JSON: %w: %w", err, errdefs.ErrUnavailable)
	}
	if e := reply.Error; e != nil {
		var class error = errdefs.ErrInvalidArgument // a program that it does not find, mostly
		if e.Class == "CommandNotFound" {
			class = errdefs.ErrNotImplemented // or has been forbidden in the guest
		}
		return fmt.Errorf("%s: %s: %w", command, printable(e.Desc), class)
	}
	return json.Unmarshal(reply.Return, answer)
}

// ask holds the socket for one question.
func (q *QGA) ask(ctx context.Context, command string, arguments, answer any) error {
	c, err := q.connect(ctx)
	if err != nil {
		return err
	}
	defer c.close()
	if err := c.ask(command, arguments, answer); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return err
	}
	return nil
}

// await looks until the program has ended, and kills it when ctx has.
func (q *QGA) await(ctx context.Context, pid int64) (status qgaStatus, err error) {
	for pause := qgaPoll; ; pause = min(2*pause, qgaPollMax) {
		err = q.ask(ctx, "guest-exec-status", map[string]any{"pid": pid}, &status)
		if err == nil && status.Exited {
			return status, nil
		}
		if ctx.Err() == nil && err != nil {
			return status, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			q.kill(context.WithoutCancel(ctx), pid)
			return status, context.Cause(ctx)
		}
	}
}

// kill ends a program by another one, since the agent cannot.
func (q *QGA) kill(ctx context.Context, pid int64) {
	ctx, cancel := context.WithTimeout(ctx, qgaFarewell)
	defer cancel()
	var started struct{ Pid int64 }
	_ = q.ask(ctx, "guest-exec", map[string]any{"path": "kill", "arg": []string{"-9", strconv.FormatInt(pid, 10)}}, &started)
}
