package wasi

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// Messages publishes the messages of wasi:messaging.
type Messages interface {
	// Send publishes data on a topic. It waits until the node has taken the message, at most until ctx ends. The data is
	// valid until Send returns. An error is errdefs.ErrPermissionDenied or has a text for the guest.
	Send(ctx context.Context, topic string, data []byte) error
}

// messageHandler is the interface that guests export to get messages. It has no functions of the host.
const messageHandler = `package wasi:messaging@0.2.0-draft;
interface incoming-handler {
  use wasi:messaging/types@0.2.0-draft.{message, error};
  handle: func(message: message) -> result<_, error>;
}`

// MessageHandler returns the interface by which guests get messages. Its only function is handle, to which the number of a
// resource that PutMessage has made belongs.
var MessageHandler = sync.OnceValue(func() *Interface {
	known, _ := Interfaces()
	all, err := ParseWIT(messageHandler, known...)
	if err != nil {
		panic(err) // impossible: a test calls this function
	}
	return all[0]
})

// client is the resource client. All clients of an instance publish by Options.Messages.
type client struct{ disconnected bool }

// message is the resource message. Content type and metadata do not exist, because a channel carries the data alone.
type message struct {
	state *State
	topic string // where it was received; empty if the guest has made it
	data  []byte
	held  int
}

// PutMessage adds a message that was received on a topic to the table, and returns its number. The data does not count as
// held: the caller limits the number of messages that it passes to guests.
func (s *State) PutMessage(topic string, data []byte) uint32 {
	return s.Put(&message{state: s, topic: topic, data: data})
}

// set replaces the data by a copy that counts as held.
func (m *message) set(data []byte) error {
	if !m.state.Hold(len(data) - m.held) {
		return ErrHeld
	}
	m.data, m.held = append([]byte(nil), data...), len(data)
	return nil
}

// Close is called when the guest drops the message.
func (m *message) Close() error {
	m.state.Hold(-m.held)
	return nil
}

// The cases of error.
const (
	messagingTimeout = iota
	messagingConnection
	messagingPermissionDenied
	messagingOther
)

var messagingCases = []string{messagingTimeout: "timeout", messagingConnection: "connection",
	messagingPermissionDenied: "permission-denied", messagingOther: "other"}

// ReadHandled reads the result of handle, and returns the guest's error as text.
func ReadHandled(result []byte) error {
	in := wit.NewReader(result)
	if in.Case(2) == 0 {
		return in.Err()
	}
	which, text := in.Case(len(messagingCases)), ""
	if which != messagingTimeout {
		text = ": " + in.String()
	}
	if err := in.Err(); err != nil {
		return err
	}
	return errors.New(messagingCases[which] + text)
}

// messagingFailed writes an error result with a text.
func (c *Call) messagingFailed(which int, text string) {
	c.FailedWith(which)
	c.Out = wit.AppendString(c.Out, text)
}

func connectClient(c *Call) error {
	if _ = c.In.String(); c.options.Messages == nil { // any name is the node's broker
		c.messagingFailed(messagingConnection, "the component has no channels: it does not run as a module of the edge")
		return nil
	}
	c.OK()
	c.Own(&client{})
	return nil
}

func disconnectClient(c *Call) error {
	k, err := Get[*client](c.State, c.In.U32())
	if err != nil {
		return err
	}
	k.disconnected = true
	c.OK()
	return nil
}

// onMessage makes a function from one with the message that the guest has passed first.
func onMessage(do func(c *Call, m *message) error) Func {
	return func(c *Call) error {
		m, err := Get[*message](c.State, c.In.U32())
		if err != nil {
			return err
		}
		return do(c, m)
	}
}

// noMetadata implements the functions that change metadata: the case not-supported.
var noMetadata = onMessage(func(c *Call, _ *message) error {
	c.FailedWith(0)
	return nil
})

var nothing = onMessage(func(c *Call, _ *message) error {
	c.Out = wit.AppendOption(c.Out, false)
	return nil
})

var messageFuncs = map[string]Func{
	"[static]client.connect":    connectClient,
	"[method]client.disconnect": disconnectClient,
	"[constructor]message": func(c *Call) error {
		m := &message{state: c.State}
		if err := m.set(c.In.Bytes()); err != nil {
			return err
		}
		c.Own(m)
		return nil
	},
	"[method]message.topic": onMessage(func(c *Call, m *message) error {
		if c.Out = wit.AppendOption(c.Out, m.topic != ""); m.topic != "" {
			c.Out = wit.AppendString(c.Out, m.topic)
		}
		return nil
	}),
	"[method]message.content-type": nothing,
	"[method]message.set-content-type": onMessage(func(c *Call, _ *message) error {
		c.Failed()
		return nil
	}),
	"[method]message.data": onMessage(func(c *Call, m *message) error {
		c.Out = wit.AppendBytes(c.Out, m.data)
		return nil
	}),
	"[method]message.set-data":        onMessage(func(c *Call, m *message) error { return m.set(c.In.Bytes()) }),
	"[method]message.metadata":        nothing,
	"[method]message.add-metadata":    noMetadata,
	"[method]message.set-metadata":    noMetadata,
	"[method]message.remove-metadata": noMetadata,
}

// sendMessage implements send of the interface producer.
func sendMessage(c *Call) error {
	k, err := Get[*client](c.State, c.In.U32())
	if err != nil {
		return err
	}
	topic := c.In.String()
	m, err := Take[*message](c.State, c.In.U32())
	if err != nil {
		return err
	}
	defer m.Close()
	if k.disconnected {
		c.messagingFailed(messagingConnection, "the client is disconnected")
		return nil
	}
	err = c.options.Messages.Send(c, topic, m.data)
	switch {
	case c.Err() != nil:
		return fmt.Errorf("send: %w", context.Cause(c))
	case errdefs.IsPermissionDenied(err):
		c.messagingFailed(messagingPermissionDenied, err.Error())
	case err != nil:
		c.messagingFailed(messagingOther, err.Error())
	default:
		c.Renew()
		c.OK()
	}
	return nil
}
