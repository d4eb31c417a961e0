package virtiofsd

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

const (
	// probeTimeout bounds a probe, which takes about 10 ms.
	probeTimeout = 10 * time.Second
	// retryInterval limits how long a failure is cached, so that a virtiofsd installed while the daemon runs is
	// noticed.
	retryInterval = time.Minute
)

// Prober tests whether virtiofsd works on this host, and caches the result. It ignores Options.Dir, LogDir and Cgroup.
type Prober struct {
	Options

	mu     sync.Mutex
	at     time.Time
	result error
}

// Probe returns nil if virtiofsd works, errdefs.ErrNotFound if it is missing, and errdefs.ErrFailedPrecondition if
// virtiofsd cannot serve a directory.
func (p *Prober) Probe(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.at.IsZero() && (p.result == nil || time.Since(p.at) < retryInterval) {
		return p.result
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	err := p.probe(ctx)
	if errors.Is(err, context.Canceled) {
		return err // a canceled probe has no result
	}
	p.at, p.result = time.Now(), err
	return err
}

// probe starts a virtiofsd on an empty directory and queries its features, as the hypervisor would. virtiofsd answers
// only after it has confined itself, so an answer shows that the confinement works.
func (p *Prober) probe(ctx context.Context) (err error) {
	o := p.Options
	if o.Program == "" {
		return fmt.Errorf("there is no virtiofsd: %w", errdefs.ErrNotFound)
	}
	if o.Dir, err = os.MkdirTemp("", "tripod-probe-"); err != nil {
		return err
	}
	defer os.RemoveAll(o.Dir)
	o.LogDir, o.Cgroup = o.Dir, ""
	const tag = "probe"
	servers, err := Start(ctx, o, []machine.Share{{Tag: tag, Path: o.Dir, Driver: machine.ShareVirtiofs, ReadOnly: true}})
	if err != nil {
		return fmt.Errorf("%s does not start: %w (%w)", o.Program, err, errdefs.ErrFailedPrecondition)
	}
	defer func() { err = errors.Join(err, servers.End(ctx)) }()
	conn, err := servers.Conn(tag)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := askFeatures(ctx, conn); err != nil {
		if words := servers.LastWords(); words != "" {
			err = errors.New(words)
		}
		return fmt.Errorf("%s does not serve a directory: %w (%w)", o.Program, err, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// askFeatures sends VHOST_USER_GET_FEATURES and reads the answer. QEMU's vhost-user specification describes both.
func askFeatures(ctx context.Context, file *os.File) error {
	conn, err := net.FileConn(file)
	if err != nil {
		return err
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(deadline)
	}
	const getFeatures, version = 1, 1
	request := binary.NativeEndian.AppendUint32(nil, getFeatures)
	request = binary.NativeEndian.AppendUint32(request, version)
	request = binary.NativeEndian.AppendUint32(request, 0)
	if _, err := conn.Write(request); err != nil {
		return err
	}
	answer := make([]byte, len(request)+8)
	if _, err := io.ReadFull(conn, answer); err != nil {
		return err
	}
	if got := binary.NativeEndian.Uint32(answer); got != getFeatures {
		return fmt.Errorf("unexpected answer %d to request %d", got, getFeatures)
	}
	return nil
}
