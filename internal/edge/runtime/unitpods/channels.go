package unitpods

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

const (
	// writeTime bounds the time that a worker can take to read a message.
	writeTime = 5 * time.Second
	// redialPause is the first delay between attempts to reach a worker. The delay doubles with each attempt.
	redialPause    = 20 * time.Millisecond
	maxRedialPause = time.Second
)

// converse maintains the connection for the module's channels until the module has ended.
func (m *module) converse() {
	defer close(m.channelsDone)
	pause := redialPause
	for m.r.ctx.Err() == nil {
		err := m.connection()
		switch {
		case m.hasEnded() || m.r.ctx.Err() != nil:
			return
		case err == nil:
			pause = redialPause
			if !m.closeChannels() {
				return
			}
		case errdefs.IsNotImplemented(err):
			m.r.log.Error("no channels for a module", "module", m.uuid, "err", err)
			return
		default:
			m.r.log.Debug("cannot reach the channels of a module yet", "module", m.uuid, "err", err)
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, maxRedialPause)
		case <-m.ended: // connect once more, to fetch the messages that the worker still has
		case <-m.r.ctx.Done():
		}
	}
}

func (m *module) hasEnded() bool {
	select {
	case <-m.ended:
		return true
	default:
		return false
	}
}

// connection makes one connection, and reads from it until the connection ends. An error means that the connection
// could not be made.
func (m *module) connection() error {
	ctx, cancel := context.WithTimeout(m.r.ctx, undoTime)
	raw, group, err := m.r.Node.Channels(ctx, m.podID)
	cancel()
	if err != nil {
		return err
	}
	conn := channel.NewConn(raw, channel.ConnOptions{Timeout: writeTime})
	defer conn.Close()
	m.mu.Lock()
	m.conn, m.group = conn, group
	m.mu.Unlock()
	if m.r.ctx.Err() != nil { // Close may have missed this connection
		return nil
	}
	settled := newSettler(conn)
	defer close(settled.done)
	m.r.spawn(settled.run)
	for {
		message, err := conn.Read()
		if err != nil {
			if !errors.Is(err, io.EOF) && m.r.ctx.Err() == nil && !m.hasEnded() {
				m.r.log.Warn("connection for a module's channels lost", "module", m.uuid, "err", err)
			}
			break
		}
		if !message.Control && m.keeps(message.Arg) {
			message.Settled = settled.received()
		}
		if !m.forward(message) {
			break
		}
	}
	m.mu.Lock()
	if m.conn == conn {
		m.conn = nil
	}
	m.mu.Unlock()
	return nil
}

// forward passes a message from the worker to the manager, with the module's index. It reports false if the runtime is
// closed.
func (m *module) forward(message channel.Message) bool {
	message.Module = m.index
	if message.Control {
		fd, open, qos := 0, false, byte(0)
		switch message.Arg {
		case channel.OpenChannel:
			o, err := channel.ParseOpen(message.Payload)
			if err != nil {
				m.r.log.Warn("cannot open a channel", "module", m.uuid, "err", err)
				return true
			}
			fd, open, qos = o.FD, true, o.Flags.QoS()
		case channel.CloseChannel:
			var err error
			if fd, err = channel.ParseClose(message.Payload); err != nil {
				m.r.log.Warn("cannot close a channel", "module", m.uuid, "err", err)
				return true
			}
		case wire.Profile:
			return m.r.send(outgoing{Message: message})
		default:
			m.r.log.Warn("unexpected control message from a worker", "module", m.uuid, "type", message.Arg)
			return true
		}
		m.mu.Lock()
		if open {
			m.open[fd] = qos
		} else {
			delete(m.open, fd)
		}
		m.mu.Unlock()
	}
	return m.r.send(outgoing{Message: message})
}

// keeps reports whether the worker keeps the channel's messages until they are settled.
func (m *module) keeps(fd int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.open[fd] > 0
}

// closeChannels reports to the manager that all channels are closed. The worker opens them again on the next
// connection. closeChannels returns false if the runtime is closed.
func (m *module) closeChannels() bool {
	m.mu.Lock()
	fds := slices.Collect(maps.Keys(m.open))
	clear(m.open)
	m.mu.Unlock()
	for _, fd := range fds {
		header := channel.Header{Control: true, Module: m.index, Arg: channel.CloseChannel}
		if !m.r.send(outgoing{Message: channel.Message{Header: header, Payload: channel.AppendClose(nil, fd)}}) {
			return false
		}
	}
	return true
}

// Send implements runtime.Runtime.
func (r *Runtime) Send(_ context.Context, message channel.Message) error {
	if r.ctx.Err() != nil {
		return r.closed()
	}
	m, err := r.at(message.Module)
	if err != nil {
		return err
	}
	// A worker gives a message to the channel that has the number now. So a message is sent only on the connection on
	// which the worker has opened the channel.
	m.mu.Lock()
	conn := m.conn
	_, open := m.open[message.Arg]
	m.mu.Unlock()
	if conn == nil || !open {
		return fmt.Errorf("module %s has not opened channel %d: %w", m.uuid, message.Arg, errdefs.ErrFailedPrecondition)
	}
	message.Module = 0
	if err := conn.Write(message); errdefs.IsInvalidArgument(err) {
		return fmt.Errorf("module %s: %w", m.uuid, err)
	} else if err != nil {
		_ = conn.Close() // the reader of this connection then makes a new one
		return fmt.Errorf("module %s: %v: %w", m.uuid, err, errdefs.ErrAborted)
	}
	return nil
}

// disconnect ends the current connection, if any.
func (m *module) disconnect() {
	m.mu.Lock()
	conn := m.conn
	m.mu.Unlock()
	if conn != nil {
		_ = conn.Close()
	}
}

func (m *module) groupName() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.group
}
