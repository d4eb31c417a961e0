package builtin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/plugins/plugins/ipam/host-local/backend/allocator"
)

// allocate takes a lease on one address from each range, and returns the addresses with the configured routes, and the
// leases of the network. If it fails, it frees the addresses that it leased. host-local's own code chooses the addresses; only
// the store (type leases) is our own code.
func (c *Call) allocate(ctx context.Context) (result *types100.Result, seen *seenLeases, err error) {
	conf, store, err := c.openLeases(ctx)
	if err != nil {
		return nil, nil, err
	}
	defer store.release()
	result = &types100.Result{Routes: conf.Routes}
	for i := range conf.Ranges {
		address, err := allocator.NewIPAllocator(&conf.Ranges[i], store, i).Get(c.container, c.ifName, nil)
		if err != nil {
			err = fmt.Errorf("host-local: range %d: %w", i, err)
			if i > 0 {
				err = errors.Join(err, store.ReleaseByID(c.container, c.ifName))
			}
			return nil, nil, err
		}
		result.IPs = append(result.IPs, address)
	}
	return result, store.seen, nil
}

// leased returns the addresses that the container's interface has leased.
func (c *Call) leased(ctx context.Context) ([]net.IP, error) {
	_, store, err := c.openLeases(ctx)
	if err != nil {
		return nil, err
	}
	defer store.release()
	addresses, err := store.findAll(c.container, c.ifName)
	if err != nil {
		return nil, fmt.Errorf("host-local: %w", err)
	}
	return addresses, nil
}

// free releases addresses that the container's interface has leased.
func (c *Call) free(ctx context.Context, addresses []net.IP) error {
	_, store, err := c.openLeases(ctx)
	if err != nil {
		return err
	}
	defer store.release()
	if err := store.remove(addresses); err != nil {
		return fmt.Errorf("host-local: %w", err)
	}
	return nil
}

func (c *Call) openLeases(ctx context.Context) (*allocator.IPAMConfig, *leases, error) {
	conf, _, err := allocator.LoadIPAMConfig(c.stdin, "")
	if err != nil {
		return nil, nil, fmt.Errorf("host-local: %w", err)
	}
	dir := cmp.Or(conf.DataDir, "/var/lib/cni/networks") // host-local's default
	store, err := openLeases(ctx, filepath.Join(dir, conf.Name))
	if err != nil {
		return nil, nil, fmt.Errorf("host-local: %w", err)
	}
	return conf, store, nil
}
