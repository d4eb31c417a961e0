package main

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"time"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/route"
	"github.com/tripod-run/tripod/internal/wasm/dataplane"
)

const (
	// routeDrain is how long requests through the router may take to finish once the daemon has been told to stop.
	routeDrain = 5 * time.Second
	// certificateCheck is how often the files of the router's certificate are looked at for new ones.
	certificateCheck = time.Minute
)

// openRouter serves the node's own addresses for components, when there are any.
func (p *parts) openRouter(ctx context.Context, c *config.Config, log *slog.Logger) error {
	if c.Route.Address == "" && c.Route.CleartextAddress == "" {
		return nil
	}
	log = log.With("part", "route")
	if p.wasm == nil {
		log.Warn("requests are not routed: the handler \"wasm\" is not offered")
		return nil
	}
	router := route.New(route.Config{Components: p.node.Components(), Services: p.wasm.Services, Dial: p.wasm.DialData, Logger: log})
	identity, follow, err := routeIdentity(c.Route, log)
	if err != nil {
		return err
	}
	server, err := route.Serve(ctx, router, route.ServeConfig{
		Address: c.Route.Address, Cleartext: c.Route.CleartextAddress, TLS: identity, Group: p.connections, Connections: limits(c.Connections), Logger: log,
	})
	if err != nil {
		return err
	}
	following, stop := context.WithCancel(context.Background())
	go follow(following)
	p.opened(func() error {
		stop()
		defer router.Close()
		ctx, cancel := context.WithTimeout(context.Background(), routeDrain)
		defer cancel()
		if err := server.Shutdown(ctx); err != nil {
			log.Warn("requests under way are cut off", "err", err)
		}
		return nil
	})
	log.Info("requests for components are routed", "address", c.Route.Address, "cleartext", c.Route.CleartextAddress)
	return nil
}

// routeIdentity is the router's certificate: that of the configured files, which follow watches, or one made for now.
func routeIdentity(c config.Route, log *slog.Logger) (_ *dataplane.TLS, follow func(context.Context), err error) {
	material, err := routeMaterial(c)
	if err != nil {
		return nil, nil, fmt.Errorf("route: %w", err)
	}
	identity, err := dataplane.NewTLS(material)
	if err != nil {
		return nil, nil, fmt.Errorf("route: %w", err)
	}
	return identity, func(ctx context.Context) {
		if c.Certificate != "" || c.ClientCA != "" {
			followMaterial(ctx, c, identity, material, certificateCheck, log)
		}
	}, nil
}

func routeMaterial(c config.Route) (m dataplane.Material, err error) {
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

// followMaterial takes new certificates from their files until ctx ends. A generated one stays as it is.
func followMaterial(ctx context.Context, c config.Route, identity *dataplane.TLS, last dataplane.Material, interval time.Duration, log *slog.Logger) {
	every(ctx, interval, func() {
		next, err := routeMaterial(c)
		if err == nil && c.Certificate == "" {
			next.Certificate, next.Key = last.Certificate, last.Key
		}
		if err == nil && bytes.Equal(next.Certificate, last.Certificate) && bytes.Equal(next.Key, last.Key) && bytes.Equal(next.ClientCAs, last.ClientCAs) {
			return
		}
		if err == nil {
			err = identity.Update(next)
		}
		if err != nil { // a certificate and its key are seldom replaced in one step: the next look may find them whole
			log.Warn("the certificate stays as it is", "err", err)
			return
		}
		last = next
		log.Info("the certificate was replaced")
	})
}
