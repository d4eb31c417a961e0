package manager

import (
	"bytes"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// receive handles a message from a runtime. It must not block; otherwise all modules of the runtime would have to wait.
func (h *host) receive(msg channel.Message) {
	if !msg.Control {
		h.fromModule(msg)
		return
	}
	switch msg.Arg {
	case wire.Keepalive:
		h.runtimeKeepalive(msg.Payload)
		return
	case wire.RuntimeLog:
		_, line := wire.ParseLog(msg.Payload)
		h.m.out.put(h.m.config.Topics.RuntimeLog(h.info.UUID), 0, trimNUL(line))
		return
	}
	mod := h.at(msg.Module)
	if mod == nil {
		h.m.refuse("unknown-index", "control message for an unknown module", "runtime", h.info.Name, "index", msg.Module, "type", msg.Arg)
		return
	}
	switch msg.Arg {
	case wire.Exited:
		h.finish(mod, h.metadata(msg.Payload))
	case channel.OpenChannel:
		h.openChannel(mod, msg.Payload)
	case channel.CloseChannel:
		h.closeChannel(mod, msg.Payload)
	case wire.ModuleLog:
		_, line := wire.ParseLog(msg.Payload)
		h.log(mod, trimNUL(line))
	case wire.Profile:
		h.m.out.put(h.m.config.Topics.Profile(h.profileKind(mod), h.info.UUID, mod.uuid), 0, msg.Payload)
	default:
		h.m.refuse("unknown-type", "control message of an unknown type from a runtime", "runtime", h.info.Name, "module", mod.uuid, "type",
			msg.Arg)
	}
}

// fromModule routes a message that a module has published.
func (h *host) fromModule(msg channel.Message) {
	mod := h.at(msg.Module)
	if mod == nil {
		h.m.refuse("unknown-index", "message from an unknown module", "runtime", h.info.Name, "index", msg.Module)
		msg.Settle()
		return
	}
	if !mod.rate.allow(time.Now(), len(msg.Payload)) {
		h.m.drop(loss{"rate", mod.uuid, h.m.router.Topic(h.key(mod, msg.Arg))}, 1, nil)
		msg.Settle()
		return
	}
	if mod.logs[msg.Arg] {
		h.log(mod, bytes.TrimSuffix(msg.Payload, []byte("\n")))
	}
	if err := h.m.router.Publish(h.key(mod, msg.Arg), msg.Payload, msg.Settled); err != nil {
		msg.Settle()
		h.m.refuse("channel", "cannot publish a module's message", "runtime", h.info.Name, "module", mod.uuid, "fd", msg.Arg, "err", err)
	}
}

// openChannel opens a channel. If the descriptor is open for another topic, openChannel closes it first, as the public
// manager does.
func (h *host) openChannel(mod *module, payload []byte) {
	o, err := channel.ParseOpen(payload)
	if err == nil {
		o.Topic = h.m.config.Topics.Expand(o.Topic, mod.uuid)
		key := h.key(mod, o.FD)
		group := h.rt.Group(mod.record.Index)
		deliver := func(payload []byte) { mod.box.put(o.FD, o.Topic, payload) }
		if h.isStdin(mod, o.Topic) {
			deliver = func(payload []byte) { mod.box.put(o.FD, o.Topic, line(payload)) }
		}
		h.logStream(mod, o.FD, o.Topic)
		if o.Flags.CanWrite() && h.m.config.Topics.Governs(o.Topic) {
			h.m.refuse("channel", "modules must not write to the topics that control nodes", "runtime", h.info.Name, "module", mod.uuid, "topic",
				o.Topic)
			return
		}
		err = h.m.router.Open(key, o, group, deliver)
		if errdefs.IsAlreadyExists(err) && h.m.router.Close(key) == nil {
			err = h.m.router.Open(key, o, group, deliver)
		}
	}
	if err != nil {
		h.m.refuse("channel", "cannot open a channel", "runtime", h.info.Name, "module", mod.uuid, "err", err)
		return
	}
	h.mu.Lock()
	ended := mod.state.recorded() == recordExited
	h.mu.Unlock()
	if ended {
		h.m.router.CloseModule(h.info.UUID, mod.record.Index)
	}
}

func (h *host) closeChannel(mod *module, payload []byte) {
	fd, err := channel.ParseClose(payload)
	if err == nil {
		err = h.m.router.Close(h.key(mod, fd))
	}
	if err != nil {
		h.m.refuse("channel", "cannot close a channel", "runtime", h.info.Name, "module", mod.uuid, "err", err)
	}
}

// profileKind returns the kind of a module's profiles: the module's field "profile", or the first part of the runtime's
// type, as public peers do.
func (h *host) profileKind(mod *module) string {
	if kind := mod.data.Text("profile"); wire.ValidName("profile", kind) == nil {
		return kind
	}
	kind, _, _ := strings.Cut(h.info.Type, "/")
	if wire.ValidName("profile", kind) != nil {
		return "runtime"
	}
	return kind
}
