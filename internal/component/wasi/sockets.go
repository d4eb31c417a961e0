package wasi

import (
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// accessDenied is the case of wasi:sockets' error-code.
const accessDenied = 1

// refuse is what every function of wasi:sockets does: there is a network, but nothing is allowed in it.
func refuse(f Signature) Func {
	switch {
	case f.Name == "instance-network":
		return func(c *Call) error { c.Own(struct{}{}); return nil }
	case f.Name == "network-error-code":
		return func(c *Call) error { c.Out = wit.AppendOption(c.Out, false); return nil }
	case f.Result != nil && f.Result.Kind == wit.Result:
		return func(c *Call) error { c.In.Raw(len(c.In.Rest())); c.FailedWith(accessDenied); return nil }
	}
	return func(*Call) error {
		return fmt.Errorf("a socket, where there is none: %w", errdefs.ErrInternal)
	}
}
