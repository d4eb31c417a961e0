package wasi

import (
	"context"
	"net/netip"
	"sync"

	"golang.org/x/net/idna"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// maxName is the maximum length of a domain name in text form (RFC 1035, 2.3.4).
const maxName = 253

// lookup is the resource resolve-address-stream.
type lookup struct {
	state  *State
	cancel context.CancelFunc

	mu    sync.Mutex
	done  bool
	addrs []netip.Addr // that the guest has not taken
	err   error
}

// resolveAddresses starts a lookup. An address needs none; whether the guest may connect to it is seen there.
func resolveAddresses(c *Call) error {
	c.In.U32() // the network
	name := c.In.String()
	if c.options.Network == nil {
		return c.codeOr(CodeAccessDenied)
	}
	addr, err := netip.ParseAddr(name)
	isAddr := err == nil && addr.Zone() == ""
	if !isAddr {
		if name, err = idna.ToASCII(name); err != nil || name == "" || len(name) > maxName {
			return c.codeOr(CodeInvalidArgument)
		}
	}
	if !c.Hold(socketBytes) {
		return c.codeOr(CodeOutOfMemory)
	}
	l := &lookup{state: c.State, cancel: func() {}}
	if isAddr {
		l.done, l.addrs = true, []netip.Addr{addr.Unmap()}
	} else {
		l.begin(name)
	}
	c.OK()
	c.Own(l)
	return nil
}

func (l *lookup) begin(name string) {
	ctx, cancel := context.WithCancel(l.state.Alive())
	l.cancel = cancel
	go func() {
		defer l.state.Wake()
		defer cancel()
		var addrs []netip.Addr
		err := l.state.Guard("resolve a name", func() (err error) {
			addrs, err = l.state.options.Network.Resolve(ctx, name)
			return err
		})
		l.mu.Lock()
		defer l.mu.Unlock()
		l.done, l.addrs, l.err = true, addrs, errorOf(err)
	}()
}

func (l *lookup) finished() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.done
}

// Close is called when the guest drops the stream.
func (l *lookup) Close() error {
	l.cancel()
	l.state.Hold(-socketBytes)
	return nil
}

func resolveNext(c *Call, l *lookup) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case !l.done:
		return CodeWouldBlock
	case l.err != nil:
		return l.err
	}
	c.OK()
	c.Out = wit.AppendOption(c.Out, len(l.addrs) > 0)
	if len(l.addrs) > 0 {
		c.writeIP(l.addrs[0])
		l.addrs = l.addrs[1:]
	}
	return nil
}

var lookupFuncs = map[string]Func{
	"resolve-addresses": resolveAddresses,
	"[method]resolve-address-stream.resolve-next-address": socketMethod(resolveNext),
	"[method]resolve-address-stream.subscribe": socketMethod(func(c *Call, l *lookup) error {
		c.Own(When(l.finished))
		return nil
	}),
}
