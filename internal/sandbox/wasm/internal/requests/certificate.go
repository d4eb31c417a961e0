package requests

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
)

// certificateCheck is the interval at which the certificate files are checked for changes.
const certificateCheck = time.Minute

// serverTLS returns the router's TLS configuration, with a certificate from the configured files or a generated one.
// The second result is a function that reloads the files until its context ends.
func serverTLS(c ServeConfig) (_ *dataplane.TLS, follow func(context.Context), err error) {
	material, err := readMaterial(c)
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

func readMaterial(c ServeConfig) (m dataplane.Material, err error) {
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

// generatedMaterial returns a self-signed certificate for the node's name and for the host part of the given address,
// if the host part is a specific IP address.
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

// followMaterial reloads the files periodically until ctx ends.
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

// refresh reloads the files and returns the material in use afterwards. If the certificate was generated, it is kept,
// and only the client authorities are reloaded.
func refresh(c ServeConfig, identity *dataplane.TLS, last dataplane.Material) dataplane.Material {
	next, err := readMaterial(c)
	if err == nil && c.Certificate == "" {
		next.Certificate, next.Key = last.Certificate, last.Key
	}
	if err == nil && bytes.Equal(next.Certificate, last.Certificate) && bytes.Equal(next.Key, last.Key) &&
		bytes.Equal(next.ClientCAs, last.ClientCAs) {
		return last
	}
	if err == nil {
		err = identity.Update(next)
	}
	if err != nil { // perhaps the certificate is replaced but its key is not yet; the next check finds both
		c.Logger.Warn("certificate not replaced", "err", err)
		return last
	}
	c.Logger.Info("certificate replaced")
	return next
}
