package worker

import (
	"context"
	"errors"
	"net/netip"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/egress"
)

// network is the wasi.Network of a pod's guests.
type network struct{ *podEgress }

// Connect implements wasi.Network.
func (n *network) Connect(ctx context.Context, kind string, to netip.AddrPort) (wasi.Socket, error) {
	conn, err := n.open(ctx, kind, to.Addr().String(), to.Port())
	if err != nil {
		return nil, socketCode(err, connectCodes)
	}
	return conn, nil
}

// Resolve implements wasi.Network.
func (n *network) Resolve(ctx context.Context, name string) ([]netip.Addr, error) {
	addrs, err := n.client.Load().Resolve(ctx, name)
	return addrs, socketCode(err, lookupCodes)
}

// connectCodes and lookupCodes map the codes of the dialer to error-codes of wasi:sockets.
var (
	connectCodes = map[egress.Code]wasi.ErrorCode{
		egress.CodeDenied: wasi.CodeAccessDenied, egress.CodeProhibited: wasi.CodeAccessDenied,
		egress.CodeRefused: wasi.CodeConnectionRefused, egress.CodeTimeout: wasi.CodeTimeout,
		egress.CodeUnroutable: wasi.CodeRemoteUnreachable, egress.CodeLimit: wasi.CodeNewSocketLimit,
		egress.CodeInvalid: wasi.CodeInvalidArgument, egress.CodeUnavailable: wasi.CodeUnknown,
	}
	lookupCodes = map[egress.Code]wasi.ErrorCode{
		egress.CodeDenied: wasi.CodeAccessDenied, egress.CodeProhibited: wasi.CodeAccessDenied,
		egress.CodeNotFound: wasi.CodeNameUnresolvable, egress.CodeNameFailure: wasi.CodeTemporaryResolverFailure,
		egress.CodeNameTimeout: wasi.CodeTemporaryResolverFailure, egress.CodeLimit: wasi.CodeTemporaryResolverFailure,
		egress.CodeInvalid: wasi.CodeInvalidArgument, egress.CodeUnavailable: wasi.CodeTemporaryResolverFailure,
	}
)

func socketCode(err error, codes map[egress.Code]wasi.ErrorCode) error {
	if e, ok := errors.AsType[*egress.Error](err); ok {
		return codes[e.Code]
	}
	return err
}
