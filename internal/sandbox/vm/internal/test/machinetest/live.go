package machinetest

import (
	"context"
	"errors"
	"fmt"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// Live acts as a daemon that dies at a fail point. It makes the given calls: "define", "start", "save" (in the
// machine's directory), "end" (which waits until the machine ends by itself), "destroy" and "undefine". If the process
// survives all calls, Live returns an error.
func Live(d machine.Driver, def machine.Definition, calls []string) error {
	ended := make(chan struct{}, 10)
	ctx := context.Background()
	if _, err := d.Recover(ctx, nil, func(machine.Event) { ended <- struct{}{} }); err != nil {
		return err
	}
	all := map[string]func() error{
		"define":   func() error { return d.Define(ctx, def) },
		"start":    func() error { return d.Start(ctx, def.Name) },
		"save":     func() error { return d.Save(ctx, def.Name, def.StateDir) },
		"end":      func() error { <-ended; return nil },
		"destroy":  func() error { return d.Destroy(ctx, def.Name) },
		"undefine": func() error { return d.Undefine(ctx, def.Name) },
	}
	for _, name := range calls {
		if err := all[name](); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return errors.New("no fail point killed the process during the calls")
}
