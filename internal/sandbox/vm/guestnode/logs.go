package guestnode

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/guestagent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
)

const (
	// logBuffer is the size of the pieces in which a log is sent, in bytes.
	logBuffer = 64 << 10
	// dropStep is the least number of bytes that the guest drops from the beginning of a log at a time.
	dropStep = 1 << 20
	// statusPoll is the interval in which follow asks whether a silent container still runs.
	statusPoll = time.Second
)

func logFile(p *sandbox.Pod, c *sandbox.Container) string {
	return filepath.Join(p.Config.GetLogDirectory(), c.Config.GetLogPath())
}

// follow serves MethodLog: it sends the container's log from the offset on, and returns when the log is complete.
func (n *Node) follow(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, offset int64, call guestagent.Call) error {
	changes, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}
	defer changes.Close()
	if err := changes.Add(p.Config.GetLogDirectory()); err != nil {
		return err
	}
	log := &follower{path: logFile(p, c), offset: offset}
	defer log.close()
	go log.drop(call.In)
	for {
		// The order matters: what the container wrote before its end is in the file by now.
		status, err := n.backend.Status(ctx, p, c)
		if err != nil {
			return err
		}
		if err := passed(ctx, log.send(call.Out), fpLogSent); err != nil {
			return err
		}
		if status.State == sandbox.StateExited || status.State == sandbox.StateAbsent {
			return nil
		}
		if err := log.await(ctx, changes); err != nil {
			return err
		}
	}
}

// follower sends one log file.
type follower struct {
	path   string
	file   atomic.Pointer[os.File]
	offset int64
}

func (f *follower) close() {
	if file := f.file.Load(); file != nil {
		file.Close()
	}
}

// send sends what the file has from the offset on.
func (f *follower) send(out io.Writer) error {
	file := f.file.Load()
	if file == nil {
		var err error
		if file, err = os.OpenFile(f.path, os.O_RDWR, 0); errors.Is(err, os.ErrNotExist) {
			return nil
		} else if err != nil {
			return err
		}
		f.file.Store(file)
	}
	n, err := io.CopyBuffer(out, struct{ io.Reader }{io.NewSectionReader(file, f.offset, 1<<62)}, make([]byte, logBuffer))
	f.offset += n
	if err != nil {
		return fmt.Errorf("send the log: %w", err)
	}
	return nil
}

// await waits until the file has changed.
func (f *follower) await(ctx context.Context, changes *fsnotify.Watcher) error {
	again := time.NewTimer(statusPoll)
	defer again.Stop()
	for {
		select {
		case e := <-changes.Events:
			if e.Name == f.path {
				return nil
			}
		case err := <-changes.Errors:
			return err
		case <-again.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// drop frees the parts of the file that the daemon has.
func (f *follower) drop(acks io.Reader) {
	var dropped int64
	for read := json.NewDecoder(acks); ; {
		var ack guestapi.Ack
		if read.Decode(&ack) != nil {
			return
		}
		if file := f.file.Load(); file != nil && ack.Offset-dropped >= dropStep {
			punch(file, dropped, ack.Offset)
			dropped = ack.Offset
		}
	}
}

// punch frees a part of the file. It does nothing if the file is closed, whose descriptor may be another file's by then.
func punch(file *os.File, from, to int64) {
	raw, err := file.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.Fallocate(int(fd), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, from, to-from)
	})
}
