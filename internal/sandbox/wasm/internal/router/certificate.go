package router

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
)

// certificateCheck is the time between two looks at the files of the certificate.
const certificateCheck = time.Minute

// identify gives the router's certificate: that of the configured files, which follow watches, or one that is generated.
func identify(c ServeConfig) (_ *dataplane.TLS, follow func(context.Context), err error) {
	material, err := materialOf(c)
	if err != nil {
		return nil, nil, fmt.Errorf("route: %w", err)
	}
	identity, err := dataplane.NewTLS(material)
	if err != nil {
		return nil, nil, fmt.Errorf("route: %w", err)
	}
	return identity, func(ctx context.Context) {
		if c.Certificate != "" || c.ClientCA != "" {
			followMaterial(ctx, c, identity, material, certificateCheck)
		}
	}, nil
}

func materialOf(c ServeConfig) (m dataplane.Material, err error) {
	if c.Certificate == "" {
		m, err = generatedMaterial(c.Address)
	} else if m.Certificate, err = os.ReadFile(c.Certificate); err == nil {
		m.Key, err = os.ReadFile(c.Key)
	}
	if err == nil && c.ClientCA != "" {
		m.ClientCAs, err = os.ReadFile(c.ClientCA)
		m.RequireClient = true
	}
	return m, err
}

// generatedMaterial is for the node's name and the address, where that is one.
func generatedMaterial(address string) (dataplane.Material, error) {
	host, err := os.Hostname()
	if err != nil {
		return dataplane.Material{}, err
	}
	var addresses []netip.Addr
	if a, err := netip.ParseAddrPort(address); err == nil && !a.Addr().IsUnspecified() {
		addresses = append(addresses, a.Addr())
	}
	return dataplane.SelfSigned([]string{host, "localhost"}, addresses)
}

// followMaterial takes new certificates from their files until ctx ends. A generated one stays.
func followMaterial(ctx context.Context, c ServeConfig, identity *dataplane.TLS, last dataplane.Material, interval time.Duration) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			last = refresh(c, identity, last)
		}
	}
}

// refresh reads the files again and returns the material that is in use afterwards.
func refresh(c ServeConfig, identity *dataplane.TLS, last dataplane.Material) dataplane.Material {
	next, err := materialOf(c)
	if err == nil && c.Certificate == "" {
		next.Certificate, next.Key = last.Certificate, last.Key
	}
	if err == nil && bytes.Equal(next.Certificate, last.Certificate) && bytes.Equal(next.Key, last.Key) && bytes.Equal(next.ClientCAs, last.ClientCAs) {
		return last
	}
	if err == nil {
		err = identity.Update(next)
	}
	if err != nil { // a certificate and its key are seldom replaced in one step: the next look may find both
		c.Logger.Warn("the certificate stays as it is", "err", err)
		return last
	}
	c.Logger.Info("the certificate was replaced")
	return next
}
