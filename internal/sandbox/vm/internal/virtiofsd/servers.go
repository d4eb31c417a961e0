package virtiofsd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/confine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

const (
	// trimInterval is the interval at which the logs are trimmed.
	trimInterval = time.Minute
	// killTimeout bounds the time from SIGKILL to the end of a virtiofsd.
	killTimeout = 10 * time.Second
)

// Servers are the virtiofsd processes of a machine, in the order of its virtio-fs shares. A nil *Servers has no
// processes.
type Servers struct{ list []*server }

// Start starts a virtiofsd for each virtio-fs share. Each virtiofsd serves one connection; Conn returns the
// hypervisor's end of that connection. The virtiofsd ends when the hypervisor ends, or when the connection is closed
// unused.
func Start(ctx context.Context, o Options, shares []machine.Share) (*Servers, error) {
	s := &Servers{}
	for i, share := range onlyVirtiofs(shares) {
		one, err := o.start(ctx, i, share)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("share %s: %w", share.Path, err), s.End(ctx))
		}
		s.list = append(s.list, one)
	}
	return s, nil
}

// Adopt returns the virtiofsd processes that an earlier daemon started, including those that have ended.
func Adopt(o Options, shares []machine.Share, ids []process.ID) (*Servers, error) {
	s := &Servers{}
	shares = onlyVirtiofs(shares)
	for i, id := range ids[:min(len(ids), len(shares))] {
		proc, err := process.Adopt(id)
		if errdefs.IsNotFound(err) {
			proc, err = process.Ended(id), nil
		}
		if err != nil {
			s.Close()
			return nil, err
		}
		s.list = append(s.list, &server{tag: shares[i].Tag, log: o.logFile(i), proc: proc})
	}
	return s, nil
}

// all returns the processes; s can be nil.
func (s *Servers) all() []*server {
	if s == nil {
		return nil
	}
	return s.list
}

// onlyVirtiofs returns the virtio-fs shares.
func onlyVirtiofs(shares []machine.Share) []machine.Share {
	return slices.DeleteFunc(slices.Clone(shares), func(s machine.Share) bool { return s.Driver != machine.ShareVirtiofs })
}

// IDs returns the process IDs, for the state file.
func (s *Servers) IDs() (ids []process.ID) {
	for _, one := range s.all() {
		ids = append(ids, one.proc.ID)
	}
	return ids
}

// Conn returns the hypervisor's end of a share's connection. The caller must close it. Conn returns errdefs.ErrNotFound
// for an unknown tag or on a second call.
func (s *Servers) Conn(tag string) (*os.File, error) {
	for _, one := range s.all() {
		if one.tag == tag && one.conn != nil {
			conn := one.conn
			one.conn = nil
			return conn, nil
		}
	}
	return nil, fmt.Errorf("no virtiofsd was started for the share %s: %w", tag, errdefs.ErrNotFound)
}

// LastWords returns the last warnings and errors of all virtiofsd logs, for error messages.
func (s *Servers) LastWords() string {
	var all []string
	for _, one := range s.all() {
		if words := confine.LastWords(one.log, ProgramName); words != "" {
			all = append(all, fmt.Sprintf("last words of virtiofsd of the share %s: %s", one.tag, words))
		}
	}
	return strings.Join(all, "; ")
}

func (s *server) lostMessage() string {
	message := fmt.Sprintf("virtiofsd of the share %s (pid %d) ended, and the guest would wait for its files forever", s.tag, s.proc.Pid)
	if words := confine.LastWords(s.log, ProgramName); words != "" {
		message += ": " + words
	}
	return message
}

// Watch waits until a virtiofsd has ended. It returns a message with the name of the share and the last words of that
// virtiofsd. It returns "" if ctx ends first. While it waits, it trims the logs.
func (s *Servers) Watch(ctx context.Context) string {
	trim := time.NewTicker(trimInterval)
	defer trim.Stop()
	ended := make(chan *server, len(s.all()))
	for _, one := range s.all() {
		go func() {
			select {
			case <-one.proc.Dead:
				ended <- one
			case <-ctx.Done():
			}
		}()
	}
	for {
		select {
		case <-ctx.Done():
			return ""
		case one := <-ended:
			return one.lostMessage()
		case <-trim.C:
			for _, one := range s.all() {
				confine.TrimLog(one.log)
			}
		}
	}
}

// End kills all processes and waits until they have ended. The machine must already have ended.
func (s *Servers) End(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTimeout)
	defer cancel()
	var errs []error
	for _, one := range s.all() {
		errs = append(errs, one.proc.Signal(unix.SIGKILL))
	}
	for _, one := range s.all() {
		if err := one.proc.Wait(ctx); err != nil {
			errs = append(errs, fmt.Errorf("virtiofsd (pid %d) was killed but has not ended: %w (%w)", one.proc.Pid, err, errdefs.ErrUnavailable))
		} else if one.reaped != nil {
			<-one.reaped
		}
	}
	s.Close()
	return errors.Join(errs...)
}

// Close releases the processes, which continue to run, and closes unused connections.
func (s *Servers) Close() {
	for _, one := range s.all() {
		one.proc.Close()
		if one.conn != nil {
			one.conn.Close()
			one.conn = nil
		}
	}
}

// RemoveLogs removes all virtiofsd logs in the directory.
func RemoveLogs(dir string) error {
	logs, err := filepath.Glob(filepath.Join(dir, ProgramName+"*.log"))
	for _, log := range logs {
		err = errors.Join(err, os.Remove(log))
	}
	return err
}
