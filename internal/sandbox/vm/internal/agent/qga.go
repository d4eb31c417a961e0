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

	"github.com/tripod-run/tripod/internal/unixsocket"
)

const (
	// qgaSync bounds the wait for the first answer from qemu-guest-agent.
	qgaSync = 3 * time.Second
	// The pause between polls for a program's end doubles from qgaPoll to qgaPollMax. There is no event for the end.
	qgaPoll, qgaPollMax = 10 * time.Millisecond, 500 * time.Millisecond
	// qgaMaxInput is the maximum size of a program's stdin in bytes. The whole stdin is sent with the request.
	qgaMaxInput = 1 << 20
	// qgaMaxAnswer is the maximum size of an answer in bytes: two outputs of 16 MiB each (the agent's own limit), in
	// base64.
	qgaMaxAnswer = 48 << 20
	// qgaKillTime bounds the request to kill a program.
	qgaKillTime = 5 * time.Second
)

// QGA is a client of the qemu-guest-agent in a guest. The guest may have no such agent. The agent's socket serves one
// client at a time, so each request uses its own connection, and all callers must share one QGA per machine.
type QGA struct {
	socket string
	busy   chan struct{} // a lock, held while connected
}

// OpenQGA returns a QGA for the given socket, which is a machine's machine.QGASocket. It does not connect yet.
func OpenQGA(socket string) *QGA { return &QGA{socket: socket, busy: make(chan struct{}, 1)} }

// Ping returns nil if the agent answers, and errdefs.ErrUnavailable if it does not answer within 3 seconds or before
// ctx ends.
func (q *QGA) Ping(ctx context.Context) error {
	return q.ask(ctx, "guest-ping", struct{}{}, &struct{}{})
}

// ExecSync runs a program in the guest like Agent.Exec, but with limitations. Output arrives only when the program has
// ended. Stdin is read before the program starts, and has at most 1 MiB. For a terminal, or a user other than root,
// ExecSync returns errdefs.ErrNotImplemented. When ctx ends, the program is killed, but not its children.
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
		_, _ = out.to.Write(out.data) // the program has ended, so a failing writer does not matter
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
		return nil, fmt.Errorf("the command is empty: %w", errdefs.ErrInvalidArgument)
	case cmd.TTY:
		return nil, fmt.Errorf("terminals need tripod-agent in the guest: %w", errdefs.ErrNotImplemented)
	case cmd.User != "" && cmd.User != "root" && cmd.User != "0":
		return nil, fmt.Errorf("programs run as root, not as %q; other users need tripod-agent in the guest: %w", cmd.User,
			errdefs.ErrNotImplemented)
	}
	if cmd.Dir != "" {
		args = append([]string{"/bin/sh", "-c", `cd "$0" && exec "$@"`, cmd.Dir}, args...)
	}
	request := map[string]any{"path": args[0], "arg": args[1:], "capture-output": true}
	if len(cmd.Env) > 0 {
		request["env"] = append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"}, cmd.Env...)
	}
	if cmd.Stdin != nil {
		input, err := io.ReadAll(io.LimitReader(cmd.Stdin, qgaMaxInput+1))
		if err != nil {
			return nil, err
		}
		if len(input) > qgaMaxInput {
			return nil, fmt.Errorf("stdin is longer than %d bytes; more needs tripod-agent in the guest: %w", qgaMaxInput, errdefs.ErrNotImplemented)
		}
		request["input-data"] = input // in base64
	}
	return request, nil
}

// qgaStatus is the answer to guest-exec-status.
type qgaStatus struct {
	Exited   bool   `json:"exited"`
	ExitCode int32  `json:"exitcode"`
	Signal   int32  `json:"signal"`
	Out      []byte `json:"out-data"`
	Err      []byte `json:"err-data"`
	OutCut   bool   `json:"out-truncated"`
	ErrCut   bool   `json:"err-truncated"`
}

// qgaConn is a connection for one request.
type qgaConn struct {
	agent *QGA
	conn  net.Conn
	in    *bufio.Reader
	stop  func() bool
}

// connect waits until the socket is free, connects, and checks that the agent answers.
func (q *QGA) connect(ctx context.Context) (*qgaConn, error) {
	select {
	case q.busy <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	c := &qgaConn{agent: q}
	conn, err := unixsocket.Dial(ctx, q.socket)
	if err != nil {
		<-q.busy
		return nil, err
	}
	c.conn, c.in = conn, bufio.NewReader(conn)
	limited, cancel := context.WithTimeout(ctx, qgaSync)
	defer cancel()
	c.bind(limited)
	err = c.sync()
	c.bind(ctx)
	if err != nil {
		c.close()
		return nil, fmt.Errorf("no qemu-guest-agent answers in the guest: %w (%w)", err, errdefs.ErrUnavailable)
	}
	return c, nil
}

// bind makes reads and writes fail when ctx ends. It replaces the context that an earlier call has set.
func (c *qgaConn) bind(ctx context.Context) {
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

// sync sends guest-sync-delimited and discards everything that arrives before the answer. The agent sends the byte
// 0xff, which never occurs in JSON, before that answer.
func (c *qgaConn) sync() error {
	var number [4]byte
	_, _ = rand.Read(number[:]) // never fails
	id := int64(binary.BigEndian.Uint32(number[:]))
	_, err := c.conn.Write(append([]byte{0xff}, `{"execute":"guest-sync-delimited","arguments":{"id":`+strconv.FormatInt(id, 10)+"}}\n"...))
	if err != nil {
		return err
	}
	for {
		if _, err := c.readTo(0xff); err != nil {
			return err
		}
		line, err := c.readTo('\n')
		if err != nil {
			return err
		}
		var answer struct{ Return int64 }
		if json.Unmarshal(line, &answer) == nil && answer.Return == id {
			return nil
		}
	}
}

// readTo reads until the given byte arrives, and returns the bytes before that byte. It fails after about qgaMaxAnswer
// bytes.
func (c *qgaConn) readTo(end byte) ([]byte, error) {
	var line []byte
	for {
		piece, err := c.in.ReadSlice(end)
		line = append(line, piece...)
		switch {
		case err == nil:
			return bytes.TrimSuffix(line, []byte{end}), nil
		case !errors.Is(err, bufio.ErrBufferFull):
			return nil, err
		case len(line) > qgaMaxAnswer:
			return nil, fmt.Errorf("the answer is longer than %d MiB: %w", qgaMaxAnswer>>20, errdefs.ErrResourceExhausted)
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
	line, err := c.readTo('\n')
	if err != nil {
		return err
	}
	var reply struct {
		Return json.RawMessage
		Error  *struct{ Class, Desc string }
	}
	if err := json.Unmarshal(line, &reply); err != nil {
		return fmt.Errorf("the answer is not valid JSON: %w: %w", err, errdefs.ErrUnavailable)
	}
	if e := reply.Error; e != nil {
		var class error = errdefs.ErrInvalidArgument // usually, the program is missing
		if e.Class == "CommandNotFound" {
			class = errdefs.ErrNotImplemented // the agent is too old, or the guest forbids the command
		}
		return fmt.Errorf("%s: %s: %w", command, printable(e.Desc), class)
	}
	return json.Unmarshal(reply.Return, answer)
}

// ask connects, sends one request and decodes the answer.
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

// await polls until the program has ended. If ctx ends first, await kills the program.
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

// kill runs kill(1) in the guest, because the agent has no command that kills a program.
func (q *QGA) kill(ctx context.Context, pid int64) {
	ctx, cancel := context.WithTimeout(ctx, qgaKillTime)
	defer cancel()
	var started struct{ Pid int64 }
	_ = q.ask(ctx, "guest-exec", map[string]any{"path": "kill", "arg": []string{"-9", strconv.FormatInt(pid, 10)}}, &started)
}
