package libvirt

import (
	"context"
	"fmt"
	"log/slog"

	golibvirt "github.com/digitalocean/go-libvirt"

	"github.com/tripod-run/tripod/internal/health"
)

// Doctor checks the wrapper and the connection to libvirtd. It changes nothing. cfg needs neither Dir nor Owner.
func Doctor(ctx context.Context, cfg Config) []health.Finding {
	wrapper := health.Finding{Subject: "tripod-vmwrap", Required: true,
		Remedy: "install tripod-vmwrap beside tripod, where every user can execute it"}
	var err error
	if cfg.Wrapper == "" {
		cfg.Wrapper, err = FindWrapper()
	}
	if err == nil {
		err = checkReachable(cfg.Wrapper)
	}
	wrapper.OK, wrapper.Detail = err == nil, cfg.Wrapper
	if err != nil {
		wrapper.Detail = err.Error()
	}
	daemon := health.Finding{Subject: "libvirtd", Required: true,
		Remedy: "install libvirt-daemon-system and start libvirtd, or set vm.libvirt_uri, or vm.driver = \"qmp\""}
	version, err := version(ctx, cfg.URI)
	daemon.OK, daemon.Detail = err == nil, version
	if err != nil {
		daemon.Detail = err.Error()
	}
	return []health.Finding{wrapper, daemon}
}

// version asks libvirtd for its version over a new connection.
func version(ctx context.Context, uri string) (string, error) {
	if uri == "" {
		uri = DefaultURI
	}
	l, err := newLink(uri, slog.New(slog.DiscardHandler))
	if err != nil {
		return "", err
	}
	client, conn, events, err := l.open(ctx)
	if err != nil {
		return "", fmt.Errorf("libvirtd cannot be reached: %w", err)
	}
	l.set(client, nil)
	n, err := ask(ctx, l, "query libvirt's version", func(c *golibvirt.Libvirt) (uint64, error) { return c.ConnectGetLibVersion() })
	conn.Close()
	for range events { // until the client notices that the connection is closed
	}
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("libvirt %d.%d.%d", n/1000000, n/1000%1000, n%1000), nil
}
