package manager

import (
	"cmp"
	"encoding/json"
	"time"

	"github.com/tripod-run/tripod/internal/edge/wire"
)

// runtimeKeepalive stores the fields of a keepalive from the runtime, and triggers a keepalive to the orchestrator.
func (h *host) runtimeKeepalive(payload []byte) {
	own := map[string]json.RawMessage{}
	if len(trimNUL(payload)) > 0 {
		var err error
		if own, err = wire.ParseObject(payload); err != nil {
			h.m.refuse("bad-json", "a runtime's keepalive is not a JSON object", "runtime", h.info.Name, "err", err)
			return
		}
	}
	h.mu.Lock()
	h.keepaliveFields = own
	h.mu.Unlock()
	poke(h.beat)
}

// keepAlive sends the runtime's keepalives, at the interval that the configuration or the orchestrator sets.
func (h *host) keepAlive() {
	m := h.m
	for m.ctx.Err() == nil {
		h.mu.Lock()
		interval, changed := h.interval, h.change
		h.mu.Unlock()
		interval = cmp.Or(max(m.config.KeepAlive, 0), interval, defaultKeepAlive)
		t := time.NewTimer(interval)
		for waiting := true; waiting; {
			select {
			case <-m.ctx.Done():
				t.Stop()
				return
			case <-changed: // restart the timer only if the interval has changed
				h.mu.Lock()
				waiting, changed = h.interval == interval || m.config.KeepAlive > 0 || h.interval == 0, h.change
				h.mu.Unlock()
			case <-h.beat:
				h.sendKeepalive()
				waiting = false
			case <-t.C:
				h.sendKeepalive()
				waiting = false
			}
		}
		t.Stop()
	}
}

// sendKeepalive sends a keepalive if the runtime is up and the broker is connected.
func (h *host) sendKeepalive() {
	if !h.isUp() || !h.m.client.Connected() {
		return
	}
	data := map[string]any{}
	children, modules := []int{}, []string{}
	for _, mod := range h.all() {
		children, modules = append(children, mod.record.Index), append(modules, mod.uuid)
	}
	apis := h.info.APIs
	if apis == nil {
		apis = []string{}
	}
	data["name"], data["apis"], data["children"], data["modules"] = h.info.Name, apis, children, modules
	h.mu.Lock()
	for name, value := range h.keepaliveFields {
		data[name] = value
	}
	h.mu.Unlock()
	data["type"], data["uuid"] = "runtime", h.info.UUID
	h.m.publish(h.m.ctx, h.m.config.Topics.Keepalive(h.info.UUID), 0, false, h.m.request(wire.ActionUpdate, object(data)).Bytes())
	h.keepScenes(h.m.ctx)
}
