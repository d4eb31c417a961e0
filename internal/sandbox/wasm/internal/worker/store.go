package worker

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/egress"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/pairs"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/redis"
)

// openStore opens the store for wasi:keyvalue, if the pod has one. Files and connections are opened when guests need them.
func (p *pod) openStore() error {
	if n := p.spec.NodeStore; n != nil {
		if n.Dir.File == nil {
			return fmt.Errorf("pod %s: the store of the node: no directory was passed: %w", p.spec.ID, errdefs.ErrInvalidArgument)
		}
		p.store = pairs.New(hostPath(n.Dir), pairs.Limits{Bytes: n.MaxBytes, Keys: n.MaxKeys})
		return nil
	}
	if p.spec.KeyValue == "" {
		return nil
	}
	a, err := redis.ParseURL(p.spec.KeyValue)
	if err != nil {
		return fmt.Errorf("pod %s: the store: %w", p.spec.ID, err)
	}
	p.redis = redis.New(a, func(ctx context.Context) (net.Conn, error) { return p.egress.dialStore(ctx, a) })
	p.store = p.redis
	return nil
}

// dialStore opens a connection to the server of a store. A nil podEgress may not.
func (o *podEgress) dialStore(ctx context.Context, a redis.Address) (net.Conn, error) {
	if o == nil {
		return nil, fmt.Errorf("the pod may not call out: %w", errdefs.ErrPermissionDenied)
	}
	conn, err := o.open(ctx, "tcp", a.Host, a.Port)
	if err != nil {
		return nil, storeError(err)
	}
	if !a.TLS {
		return conn, nil
	}
	roots, err := o.roots()
	if err != nil {
		conn.Close()
		return nil, err
	}
	secure := tls.Client(conn, &tls.Config{ServerName: a.Host, RootCAs: roots})
	ctx, cancel := context.WithTimeout(ctx, handshakeTime)
	defer cancel()
	if err := secure.HandshakeContext(ctx); err != nil {
		conn.Close()
		return nil, fmt.Errorf("TLS: %w", err)
	}
	return secure, nil
}

// storeError gives errors of the dialer their class.
func storeError(err error) error {
	e, ok := errors.AsType[*egress.Error](err)
	if ok && (e.Code == egress.CodeDenied || e.Code == egress.CodeProhibited) {
		return fmt.Errorf("%w: %w", e, errdefs.ErrPermissionDenied)
	}
	return err
}
