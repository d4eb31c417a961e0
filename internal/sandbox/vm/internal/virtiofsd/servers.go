package virtiofsd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/confine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

const (
	// trimInterval is how often the logs are looked at.
	trimInterval = time.Minute
	// endTime bounds the end of a virtiofsd that was killed.
	endTime = 10 * time.Second
)

// Servers are the virtiofsd of one machine, in the order of its shares by virtio-fs. The nil Servers are none.
type Servers struct{ list []*server }

// Start starts one for each of the shares that are by virtio-fs. They wait for the hypervisor, which is given Conn, and end
// when that has ended, or if it is never there when the ends of their connections are closed.
func Start(ctx context.Context, o Options, shares []machine.Share) (*Servers, error) {
	s := &Servers{}
	for i, share := range virtiofs(shares) {
		one, err := o.start(ctx, i, share)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("share %s: %w", share.Path, err), s.End(ctx))
		}
		s.list = append(s.list, one)
	}
	return s, nil
}

// Adopt finds those that an earlier life of the daemon has started; one that has ended is among them.
func Adopt(o Options, shares []machine.Share, ids []process.ID) (*Servers, error) {
	s := &Servers{}
	shares = virtiofs(shares)
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

// virtiofs are those of the shares that are by virtio-fs.
func virtiofs(shares []machine.Share) (list []machine.Share) {
	for _, s := range shares {
		if s.Driver == machine.ShareVirtiofs {
			list = append(list, s)
		}
	}
	return list
}

// IDs are what a state file keeps.
func (s *Servers) IDs() (ids []process.ID) {
	if s == nil {
		return nil
	}
	for _, one := range s.list {
		ids = append(ids, one.proc.ID)
	}
	return ids
}

// Conn takes the hypervisor's end of the connection for the share of that tag, which is the caller's to close. It is
// errdefs.ErrNotFound when there is none, or it was taken.
func (s *Servers) Conn(tag string) (*os.File, error) {
	if s != nil {
		for _, one := range s.list {
			if one.tag == tag && one.conn != nil {
				conn := one.conn
				one.conn = nil
				return conn, nil
			}
		}
	}
	return nil, fmt.Errorf("no virtiofsd was started for the share %s: %w", tag, errdefs.ErrNotFound)
}

// Words are what they have had to say: warnings and errors, for a person.
func (s *Servers) Words() string {
	var all []string
	if s != nil {
		for _, one := range s.list {
			if words := confine.LastWords(one.log, ProgramName); words != "" {
				all = append(all, fmt.Sprintf("virtiofsd of the share %s said: %s", one.tag, words))
			}
		}
	}
	return strings.Join(all, "; ")
}

func (s *server) lost() string {
	message := fmt.Sprintf("virtiofsd of the share %s (pid %d) ended, and the guest would wait for its files for ever", s.tag, s.proc.Pid)
	if words := confine.LastWords(s.log, ProgramName); words != "" {
		message += ": " + words
	}
	return message
}

// Watch returns once one of them has ended, which it names with its last words, or "" at the end of ctx. Meanwhile it bounds
// the logs.
func (s *Servers) Watch(ctx context.Context) string {
	if s == nil || len(s.list) == 0 {
		<-ctx.Done()
		return ""
	}
	trim := time.NewTicker(trimInterval)
	defer trim.Stop()
	ended := make(chan *server, len(s.list))
	for _, one := range s.list {
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
			return one.lost()
		case <-trim.C:
			for _, one := range s.list {
				confine.TrimLog(one.log)
			}
		}
	}
}

// End kills them and waits until they are dead. The machine must not run any more.
func (s *Servers) End(ctx context.Context) error {
	if s == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTime)
	defer cancel()
	var errs []error
	for _, one := range s.list {
		errs = append(errs, one.proc.Signal(unix.SIGKILL))
	}
	for _, one := range s.list {
		if err := one.proc.Wait(ctx); err != nil {
			errs = append(errs, fmt.Errorf("virtiofsd (pid %d) was killed and has not ended: %w (%w)", one.proc.Pid, err, errdefs.ErrUnavailable))
		} else if one.reaped != nil {
			<-one.reaped
		}
	}
	s.Close()
	return errors.Join(errs...)
}

// Close lets go of them: they go on.
func (s *Servers) Close() {
	if s == nil {
		return
	}
	for _, one := range s.list {
		one.proc.Close()
		if one.conn != nil {
			one.conn.Close()
			one.conn = nil
		}
	}
}

// RemoveLogs removes what they have said.
func RemoveLogs(dir string) error {
	logs, err := filepath.Glob(filepath.Join(dir, ProgramName+"*.log"))
	for _, log := range logs {
		err = errors.Join(err, os.Remove(log))
	}
	return err
}
