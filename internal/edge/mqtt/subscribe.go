package mqtt

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/packet"
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
	codes, err := c.subscribe(ctx, l, []packet.Subscription{c.option(filter, subscription{qos, opts})})
	if err != nil {
		if ctx.Err() == nil { // the connection is lost; the next connection renews the subscription
			return nil
		}
		return fmt.Errorf("mqtt: subscribe to %q: %w", filter, err)
	}
	if codes[0].Failed() {
		c.mu.Lock()
		delete(c.subs, filter)
		c.mu.Unlock()
		return fmt.Errorf("mqtt: subscribe to %q: the broker refused: %v: %w", filter, codes[0], errdefs.ErrPermissionDenied)
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
	err := c.unsubscribe(ctx, l, []string{filter})
	if err == nil {
		c.mu.Lock()
		delete(c.unsubscribed, filter)
		c.mu.Unlock()
	} else if ctx.Err() != nil {
		return fmt.Errorf("mqtt: unsubscribe from %q: %w", filter, err)
	}
	return nil
}

func (c *client) option(filter string, s subscription) packet.Subscription {
	o := packet.Subscription{Filter: filter, QoS: s.qos, NoLocal: c.cfg.NoLocal}
	if s.opts.SkipRetained {
		o.RetainHandling = 2
	}
	return o
}

// subscribe sends a SUBSCRIBE and returns the broker's reason code for each filter.
func (c *client) subscribe(ctx context.Context, l *link, filters []packet.Subscription) ([]packet.Code, error) {
	p := &packet.Subscribe{Filters: filters}
	answer, err := c.request(ctx, l, p, &p.ID)
	if err != nil {
		return nil, err
	}
	if len(answer.Codes) != len(filters) {
		return nil, &packet.Error{Code: packet.ProtocolError, Text: fmt.Sprintf("%d filters sent, %d answered", len(filters), len(answer.Codes))}
	}
	return answer.Codes, nil
}

func (c *client) unsubscribe(ctx context.Context, l *link, filters []string) error {
	p := &packet.Unsubscribe{Filters: filters}
	_, err := c.request(ctx, l, p, &p.ID)
	return err
}

// request sends a packet, whose identifier it sets, and waits for its answer.
func (c *client) request(ctx context.Context, l *link, p packet.Packet, id *uint16) (*packet.Suback, error) {
	free, answer := c.out.wait()
	*id = free
	defer c.out.forget(free)
	if err := l.send(p); err != nil {
		return nil, err
	}
	late := time.NewTimer(answerTimeout)
	defer late.Stop()
	select {
	case p := <-answer:
		return p, nil
	case <-l.done:
		return nil, l.cause()
	case <-late.C:
		err := fmt.Errorf("mqtt: the broker does not answer a SUBSCRIBE or UNSUBSCRIBE: %w", errdefs.ErrUnavailable)
		l.fail(err)
		return nil, err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// resubscribe renews all subscriptions on a new connection. It also sends the UNSUBSCRIBEs that could not be sent while
// there was no connection.
func (c *client) resubscribe(l *link) error {
	c.mu.Lock()
	var all []packet.Subscription
	var unsubscribed []string
	for filter, s := range c.subs {
		all = append(all, c.option(filter, s))
	}
	for filter := range c.unsubscribed {
		unsubscribed = append(unsubscribed, filter)
	}
	c.mu.Unlock()
	for len(all) > 0 {
		n := min(len(all), filtersAtOnce)
		codes, err := c.subscribe(c.ctx, l, all[:n])
		if err != nil {
			return err
		}
		for i, code := range codes {
			if code.Failed() { // keep the subscription, because the broker's ACL may change before the next connect
				c.cfg.Log.Error("mqtt: the broker refused a subscription that it had granted", "filter", all[i].Filter, "reason", code.String())
			}
		}
		all = all[n:]
	}
	if len(unsubscribed) == 0 {
		return nil
	}
	err := c.unsubscribe(c.ctx, l, unsubscribed)
	if err == nil {
		c.mu.Lock()
		for _, filter := range unsubscribed {
			delete(c.unsubscribed, filter)
		}
		c.mu.Unlock()
	}
	return err
}
