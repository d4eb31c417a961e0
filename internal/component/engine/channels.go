package engine

// #include "tw.h"
import "C"

import (
	"errors"
	"fmt"
	"io"
	"runtime/cgo"
	"unsafe"

	"github.com/containerd/errdefs"
)

// Channels are the channels that a guest of preview 1 finds in the directory /ch, each under its name. Those with the names
// stdin, stdout and stderr take the place of these streams. Components have no such directory.
type Channels interface {
	// Open opens a channel. errdefs.ErrNotFound: there is none of this name; ErrPermissionDenied: not for reading, or writing;
	// ErrResourceExhausted: too many are open. Neither read nor write asks only whether there is one, and opens nothing.
	// The channel calls wake, from any goroutine and without locks of its own, when a call that gave ErrWait may do better
	// now; also when the instance is closed already. Whoever made the Channels closes what the guest leaves open.
	Open(name string, read, write bool, wake func()) (Channel, error)
}

// Channel is an open channel of one guest. Its methods are called on the guest's thread and must not wait.
type Channel interface {
	// Send publishes a message, p, which is the guest's again when it returns. ErrWait: there is no room now.
	Send(p []byte) error
	// Receive gives the next message; ErrWait: there is none now, io.EOF: there will be none any more.
	Receive() ([]byte, error)
	// Ready tells whether Receive, or Send, would give anything else than ErrWait.
	Ready(write bool) bool
	Close()
}

// ErrWait is what a Channel gives that would have to wait.
var ErrWait = errors.New("would wait")

// Error numbers of preview 1, and the modes of the C half.
const (
	errnoACCES  = 2
	errnoAGAIN  = 6
	errnoINVAL  = 28
	errnoIO     = 29
	errnoMFILE  = 33
	errnoNOENT  = 44
	errnoPIPE   = 64
	modeRead    = C.TW_READ
	modeWrite   = C.TW_WRITE
	maxChannels = 1 << 16 // of a guest, by any name
)

// descriptor is a channel that the guest has open; rest is of the message that it has begun to read.
type descriptor struct {
	Channel
	rest []byte
}

// stdioNames are the channels that are standard streams.
var stdioNames = [3]string{"stdin", "stdout", "stderr"}

// withFiles gives a guest of preview 1 what it needs for directories and channels.
func (i *Instance) withFiles(o *C.tw_opts) error {
	if i.link.module == nil || !i.code.img.CoreWASI {
		return nil
	}
	if len(i.opts.Preopens) > 0 {
		p, err := i.code.engine.passings.of(i.link.c.engine)
		if err != nil {
			return err
		}
		o.passing.linker, o.passing.module = p.linker, p.module
	}
	if i.opts.Channels == nil || i.code.img.Component {
		return nil
	}
	o.channels = true
	return i.openStdio(o)
}

// closeChannels closes what the guest has open. It does not run.
func (i *Instance) closeChannels() {
	for _, d := range i.channels {
		if d != nil {
			d.Close()
		}
	}
	i.channels = nil
}

// openStdio opens the channels that are standard streams.
func (i *Instance) openStdio(o *C.tw_opts) error {
	for fd, name := range stdioNames {
		o.stdio[fd] = -1
		n, err := i.openChannel(name, fd == 0, fd > 0)
		if err == nil {
			o.stdio[fd] = C.int(n)
		} else if !errdefs.IsNotFound(err) {
			return fmt.Errorf("channel %s: %w", name, err)
		}
	}
	return nil
}

func (i *Instance) openChannel(name string, read, write bool) (int, error) {
	ch, err := i.opts.Channels.Open(name, read, write, i.wake)
	if err != nil || !read && !write {
		return 0, err
	}
	for n, d := range i.channels {
		if d == nil {
			i.channels[n] = &descriptor{Channel: ch}
			return n, nil
		}
	}
	if len(i.channels) == maxChannels {
		ch.Close()
		return 0, fmt.Errorf("%d channels are open: %w", maxChannels, errdefs.ErrResourceExhausted)
	}
	i.channels = append(i.channels, &descriptor{Channel: ch})
	return len(i.channels) - 1, nil
}

// wake wakes the guest if it waits for a channel.
func (i *Instance) wake() {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.c != nil {
		C.tw_wake(i.c)
	}
}

// errno is the number by which a guest knows an error of a channel.
func errno(err error) int {
	switch {
	case errors.Is(err, ErrWait):
		return errnoAGAIN
	case errors.Is(err, io.EOF):
		return errnoPIPE
	case errdefs.IsNotFound(err):
		return errnoNOENT
	case errdefs.IsPermissionDenied(err):
		return errnoACCES
	case errdefs.IsResourceExhausted(err):
		return errnoMFILE
	case errdefs.IsInvalidArgument(err):
		return errnoINVAL
	}
	return errnoIO
}

// onChannel does something with a channel, on the guest's thread. A panic is an I/O error for the guest.
func onChannel(handle C.uintptr_t, n C.int, do func(d *descriptor) int) (result int) {
	i := cgo.Handle(handle).Value().(*Instance)
	i.hosting.Store(true)
	defer i.hosting.Store(false)
	result = -errnoIO
	defer i.contain("channel")
	if n := int(n); n < len(i.channels) && i.channels[n] != nil {
		return do(i.channels[n])
	}
	return result
}

//export twChannelOpen
func twChannelOpen(handle C.uintptr_t, name *C.uint8_t, n C.size_t, modes C.int) (result C.int) {
	i := cgo.Handle(handle).Value().(*Instance)
	i.hosting.Store(true)
	defer i.hosting.Store(false)
	result = -errnoIO
	defer i.contain("channel")
	number, err := i.openChannel(C.GoStringN((*C.char)(unsafe.Pointer(name)), C.int(n)), modes&modeRead != 0, modes&modeWrite != 0)
	if err != nil {
		return C.int(-errno(err))
	}
	return C.int(number)
}

//export twChannelClose
func twChannelClose(handle C.uintptr_t, n C.int) {
	onChannel(handle, n, func(d *descriptor) int {
		cgo.Handle(handle).Value().(*Instance).channels[n] = nil
		d.Close()
		return 0
	})
}

// twChannelRead gives the guest of a message what fits. Empty messages are passed over: to a guest they would be the end.
//
//export twChannelRead
func twChannelRead(handle C.uintptr_t, n C.int, p *C.uint8_t, size C.size_t, more C.bool) C.int64_t {
	return C.int64_t(onChannel(handle, n, func(d *descriptor) int {
		for len(d.rest) == 0 && !bool(more) {
			var err error
			if d.rest, err = d.Receive(); errors.Is(err, io.EOF) {
				return 0
			} else if err != nil {
				return -errno(err)
			}
		}
		k := copy(unsafe.Slice((*byte)(p), int(size)), d.rest)
		if d.rest = d.rest[k:]; len(d.rest) == 0 {
			d.rest = nil
		}
		return k
	}))
}

//export twChannelWrite
func twChannelWrite(handle C.uintptr_t, n C.int, p *C.uint8_t, size C.size_t) C.int64_t {
	return C.int64_t(onChannel(handle, n, func(d *descriptor) int {
		if err := d.Send(unsafe.Slice((*byte)(p), int(size))); err != nil {
			return -errno(err)
		}
		return int(size)
	}))
}

//export twChannelReady
func twChannelReady(handle C.uintptr_t, n, mode C.int) C.int {
	return C.int(onChannel(handle, n, func(d *descriptor) int {
		if mode == modeRead && len(d.rest) > 0 || d.Ready(mode == modeWrite) {
			return 1
		}
		return 0
	}))
}
