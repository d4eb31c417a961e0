package egress

import (
	"net/netip"
	"time"

	"github.com/tripod-run/tripod/internal/fdpass"
)

// MaxMessage bounds the length of a message on the connection of a pod, and MaxOrder that of an Order, in bytes.
const (
	MaxMessage = 8 << 10
	MaxOrder   = 256 << 10
)

// MaxPending bounds the requests of a pod that have no reply yet. A Client makes further ones wait; the dialer closes the
// connection of a worker that sends them.
const MaxPending = 64

// DialTime bounds a request, whatever its timeout.
const DialTime = 30 * time.Second

// Order makes the dialer serve a pod. Two files come with it: the network namespace of the pod, and the dialer's end of
// the pod's connection. The dialer serves the pod until the other end of the connection is closed.
type Order struct {
	// Pod names the pod in the log.
	Pod string `json:"pod"`
	// Rules is the text of the pod's rules; see ParseRules.
	Rules string `json:"rules"`
	DNS   DNS    `json:"dns"`
}

// DNS is the pod's resolver configuration: the directives of resolv.conf(5).
type DNS struct {
	Servers  []string `json:"servers,omitempty"`
	Searches []string `json:"searches,omitempty"`
	Options  []string `json:"options,omitempty"`
}

// OrderReply is the dialer's answer to an Order.
type OrderReply struct {
	Error *fdpass.Error `json:"error,omitempty"`
}

// Operations of a Request.
const (
	OpConnect = "connect" // to Host and Port; the reply comes with the socket
	OpResolve = "resolve" // the name Host
	OpCancel  = "cancel"  // the request with the same ID; there is no reply
)

// Request is a message from a worker to the dialer.
type Request struct {
	ID uint64 `json:"id"`
	Op string `json:"op"`
	// Network is "tcp" or "udp". A UDP socket is connected, too, so that it reaches only the address that was allowed.
	Network string `json:"network,omitempty"`
	// Host is a name or an address.
	Host string `json:"host,omitempty"`
	Port uint16 `json:"port,omitempty"`
}

// Reply answers the Request with the same ID. Replies can come in any order.
type Reply struct {
	ID    uint64 `json:"id"`
	Error *Error `json:"error,omitempty"`
	// Addrs are the addresses of a resolved name that the rules allow at some port.
	Addrs []netip.Addr `json:"addrs,omitempty"`
}

// Code classifies the failure of a Request.
type Code string

// The codes.
const (
	CodeDenied      Code = "denied"       // the rules allow neither this name nor this address
	CodeProhibited  Code = "prohibited"   // the rules do not allow the addresses of this name
	CodeNotFound    Code = "not-found"    // the name does not exist, or has no addresses
	CodeNameFailure Code = "name-failure" // no name server gave a useful answer
	CodeNameTimeout Code = "name-timeout" // no name server answered in time
	CodeRefused     Code = "refused"      // the peer refused the connection
	CodeTimeout     Code = "timeout"      // the peer did not answer in time
	CodeUnroutable  Code = "unroutable"   // there is no route to the address
	CodeLimit       Code = "limit"        // too many requests or sockets
	CodeInvalid     Code = "invalid"      // the request is invalid
	CodeUnavailable Code = "unavailable"  // the dialer or the kernel failed otherwise
)

// Error is the failure of a Request.
type Error struct {
	Code    Code   `json:"code"`
	Message string `json:"message"`
}

func (e *Error) Error() string { return e.Message }

// Timeout implements net.Error.
func (e *Error) Timeout() bool { return e.Code == CodeTimeout || e.Code == CodeNameTimeout }

// Temporary implements net.Error.
func (e *Error) Temporary() bool { return e.Timeout() || e.Code == CodeLimit }
