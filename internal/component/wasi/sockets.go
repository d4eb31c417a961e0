package wasi

import (
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// accessDenied is a case of error-code in wasi:sockets.
const accessDenied = 1

// refuse returns the implementation of a function of wasi:sockets. The guest gets a network resource, but every use of
// it is denied.
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
		return fmt.Errorf("a socket was used, but none can exist: %w", errdefs.ErrInternal)
	}
}
