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

// Channels opens the channels of a preview 1 guest by name. The guest sees them in its directory /ch. A channel named
// stdin, stdout or stderr replaces the standard stream of that name. Components have no directory /ch.
type Channels interface {
	// Open opens a channel. It returns errdefs.ErrNotFound if no channel has that name, ErrPermissionDenied if the
	// channel cannot be read or written as asked, and ErrResourceExhausted if too many channels are open. With read and
	// write both false, Open only checks that the channel exists and opens nothing. The channel calls wake when an
	// operation that returned ErrWait should be tried again. It may call wake from any goroutine, even after the
	// instance is closed, but must not hold its own locks during that call. The creator of the Channels closes the
	// channels that the guest leaves open.
	Open(name string, read, write bool, wake func()) (Channel, error)
}

// Channel is an open channel of one guest. Its methods are called on the guest's thread and must not wait.
type Channel interface {
	// Send publishes the message p, and does not keep p. It returns ErrWait if the channel has no room now.
	Send(p []byte) error
	// Receive returns the next message, ErrWait if none has arrived yet, or io.EOF after the last message.
	Receive() ([]byte, error)
	// Ready reports whether an operation could proceed now, instead of returning ErrWait. The operation is Send if
	// write is true, otherwise Receive.
	Ready(write bool) bool
	Close()
}

// ErrWait means that a method of a Channel would have to wait.
var ErrWait = errors.New("would wait")

// Error numbers of preview 1, modes of the C half, and limits.
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
	maxChannels = 1 << 16 // open descriptors of channels per guest
)

// descriptor is a guest's open channel.
type descriptor struct {
	Channel
	rest   []byte // the unread part of the current message
	ofCall bool   // it is closed when the call ends
}

// stdioNames are the names of the channels that replace standard streams. The index is the descriptor.
var stdioNames = [3]string{"stdin", "stdout", "stderr"}

// addFiles sets the options that give a preview 1 guest its directories and channels.
func (i *Instance) addFiles(o *C.tw_opts) error {
	if i.link.module == nil || !i.code.img.CoreWASI {
		return nil
	}
	if len(i.opts.Preopens) > 0 {
		p, err := i.code.engine.forwarders.forEngine(i.link.c.engine)
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

// closeChannels closes the guest's open channels. The guest must not be running.
func (i *Instance) closeChannels() {
	for _, d := range i.channels {
		if d != nil {
			d.Close()
		}
	}
	i.channels = nil
}

// openStdio opens the channels that replace standard streams.
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

// OpenChannel gives the guest a descriptor of preview 1 for a channel, with which it can wait in poll_oneoff. The
// function open gets the wake function of the channel (see Channels.Open). The descriptor and
// the channel are closed when the guest closes the descriptor, at the latest when the call ends. If the guest is
// abandoned, the channel is not closed. If too many descriptors are open, or the guest has no preview 1, the error is
// errdefs.ErrResourceExhausted or ErrFailedPrecondition.
func (c *HostCall) OpenChannel(open func(wake func()) Channel) (uint32, error) {
	i := c.inst
	if i.link.module == nil || !i.code.img.CoreWASI {
		return 0, fmt.Errorf("only guests of preview 1 have descriptors: %w", errdefs.ErrFailedPrecondition)
	}
	n, err := i.addChannel(open(i.wake))
	if err != nil {
		return 0, err
	}
	number, d := C.uint32_t(0), C.tw_fd{kind: C.TW_FD_CHANNEL, modes: C.TW_READ | C.TW_WRITE, flags: C.TW_NONBLOCK, n: C.uint32_t(n)}
	if !C.tw_fd_new(c.c, d, &number) {
		i.channels[n].Close()
		i.channels[n] = nil
		return 0, fmt.Errorf("the guest has too many open descriptors: %w", errdefs.ErrResourceExhausted)
	}
	i.channels[n].ofCall = true
	return uint32(number), nil
}

// closeCallChannels closes the descriptors that OpenChannel has given the guest in this call. The guest must not be
// running.
func (i *Instance) closeCallChannels() {
	for n, d := range i.channels {
		if d != nil && d.ofCall {
			C.tw_fd_free(i.c, C.uint32_t(n))
			i.channels[n] = nil
			d.Close()
		}
	}
}

func (i *Instance) openChannel(name string, read, write bool) (int, error) {
	ch, err := i.opts.Channels.Open(name, read, write, i.wake)
	if err != nil || !read && !write {
		return 0, err
	}
	return i.addChannel(ch)
}

// addChannel returns the number of a channel for the C half. On an error, it closes the channel.
func (i *Instance) addChannel(ch Channel) (int, error) {
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

// errno returns the preview 1 error number for an error of a channel.
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

// onChannel calls the given function with channel number n, on the guest's thread. If the function panics, the guest
// sees an I/O error.
func onChannel(handle C.uintptr_t, n C.int, do func(d *descriptor) int) (result int) {
	i := cgo.Handle(handle).Value().(*Instance)
	i.hosting.Store(true)
	defer i.hosting.Store(false)
	result = -errnoIO
	defer i.recoverPanic("channel")
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
	defer i.recoverPanic("channel")
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

// twChannelRead copies as much of the current message as fits. It skips empty messages, which would look like EOF.
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
