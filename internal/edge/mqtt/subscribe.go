package mqtt

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"github.com/mochi-mqtt/server/v2/packets"
)

const (
	// filtersAtOnce is the number of filters in one SUBSCRIBE after a reconnect.
	filtersAtOnce = 64
	// answerTimeout is the time after which the client disconnects from a broker that does not answer a SUBSCRIBE or
	// UNSUBSCRIBE.
	answerTimeout = 20 * time.Second
)

func (c *client) Subscribe(ctx context.Context, filter string, qos byte, opts SubscribeOptions) error {
	if err := checkFilter(filter, qos); err != nil {
		return fmt.Errorf("mqtt: subscribe: %w", err)
	}
	c.mu.Lock()
	c.subs[filter] = subscription{qos, opts}
	delete(c.unsubscribed, filter)
	l := c.link
	c.mu.Unlock()
	if c.ctx.Err() != nil {
		return errClosed
	}
	if l == nil {
		return nil
	}
	codes, err := c.subscribe(ctx, l, []packets.Subscription{c.option(filter, subscription{qos, opts})})
	if err != nil {
		if ctx.Err() == nil { // the connection is lost; the next connection renews the subscription
			return nil
		}
		return fmt.Errorf("mqtt: subscribe to %q: %w", filter, err)
	}
	if codes[0] >= 0x80 {
		c.mu.Lock()
		delete(c.subs, filter)
		c.mu.Unlock()
		return fmt.Errorf("mqtt: subscribe to %q: the broker refused, reason 0x%02x: %w", filter, codes[0], errdefs.ErrPermissionDenied)
	}
	return nil
}

func (c *client) Unsubscribe(ctx context.Context, filter string) error {
	c.mu.Lock()
	_, known := c.subs[filter]
	delete(c.subs, filter)
	if known {
		c.unsubscribed[filter] = struct{}{}
	}
	l := c.link
	c.mu.Unlock()
	if !known || l == nil {
		return nil
	}
	_, err := c.request(ctx, l, packets.Packet{
		FixedHeader: packets.FixedHeader{Type: packets.Unsubscribe, Qos: 1}, Filters: packets.Subscriptions{{Filter: filter}},
	})
	if err == nil {
		c.mu.Lock()
		delete(c.unsubscribed, filter)
		c.mu.Unlock()
	} else if ctx.Err() != nil {
		return fmt.Errorf("mqtt: unsubscribe from %q: %w", filter, err)
	}
	return nil
}

func (c *client) option(filter string, s subscription) packets.Subscription {
	o := packets.Subscription{Filter: filter, Qos: s.qos, NoLocal: c.cfg.NoLocal}
	if s.opts.SkipRetained {
		o.RetainHandling = 2
	}
	return o
}

// subscribe sends a SUBSCRIBE and returns the broker's reason code for each filter.
func (c *client) subscribe(ctx context.Context, l *link, filters []packets.Subscription) ([]byte, error) {
	pk, err := c.request(ctx, l, packets.Packet{FixedHeader: packets.FixedHeader{Type: packets.Subscribe, Qos: 1}, Filters: filters})
	if err != nil {
		return nil, err
	}
	if len(pk.ReasonCodes) != len(filters) {
		return nil, fmt.Errorf("mqtt: %d filters sent, %d answered: %w", len(filters), len(pk.ReasonCodes), packets.ErrProtocolViolation)
	}
	return pk.ReasonCodes, nil
}

// request sends a packet and waits for its answer.
func (c *client) request(ctx context.Context, l *link, pk packets.Packet) (packets.Packet, error) {
	var answer chan packets.Packet
	pk.PacketID, answer = c.out.wait()
	defer c.out.forget(pk.PacketID)
	if err := l.send(pk); err != nil {
		return pk, err
	}
	late := time.NewTimer(answerTimeout)
	defer late.Stop()
	select {
	case pk := <-answer:
		return pk, nil
	case <-l.done:
		return pk, l.cause()
	case <-late.C:
		err := fmt.Errorf("mqtt: the broker does not answer %s: %w", packets.PacketNames[pk.FixedHeader.Type], errdefs.ErrUnavailable)
		l.fail(err)
		return pk, err
	case <-ctx.Done():
		return pk, ctx.Err()
	}
}

// resubscribe renews all subscriptions on a new connection. It also sends the UNSUBSCRIBEs that could not be sent while
// there was no connection.
func (c *client) resubscribe(l *link) error {
	c.mu.Lock()
	var all, unsubscribed packets.Subscriptions
	for filter, s := range c.subs {
		all = append(all, c.option(filter, s))
	}
	for filter := range c.unsubscribed {
		unsubscribed = append(unsubscribed, packets.Subscription{Filter: filter})
	}
	c.mu.Unlock()
	for len(all) > 0 {
		n := min(len(all), filtersAtOnce)
		codes, err := c.subscribe(c.ctx, l, all[:n])
		if err != nil {
			return err
		}
		for i, code := range codes {
			if code >= 0x80 { // keep the subscription, because the broker's ACL may change before the next connect
				c.cfg.Log.Error("mqtt: the broker refused a subscription that it had granted", "filter", all[i].Filter, "reason", fmt.Sprintf("0x%02x", code))
			}
		}
		all = all[n:]
	}
	if len(unsubscribed) == 0 {
		return nil
	}
	_, err := c.request(c.ctx, l, packets.Packet{FixedHeader: packets.FixedHeader{Type: packets.Unsubscribe, Qos: 1}, Filters: unsubscribed})
	if err == nil {
		c.mu.Lock()
		for _, s := range unsubscribed {
			delete(c.unsubscribed, s.Filter)
		}
		c.mu.Unlock()
	}
	return err
}
