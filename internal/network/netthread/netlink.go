package netthread

import (
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// AnswerTime limits how long a request to the kernel's netlink can take, in case the answer is lost. It is the limit
// of netlink's own functions.
const AnswerTime = time.Minute

// Handle opens a netlink handle of the calling thread's network namespace.
func Handle() (*netlink.Handle, error) {
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	if err := handle.SetSocketTimeout(AnswerTime); err != nil {
		handle.Close()
		return nil, fmt.Errorf("limit the time of netlink's answers: %w", err)
	}
	return handle, nil
}

// Dump repeats a netlink dump that a concurrent change interrupted.
func Dump[T any](dump func() (T, error)) (T, error) {
	for range 10 {
		if found, err := dump(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return found, err
		}
	}
	return dump()
}
