package wasi

import (
	"maps"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// socketOption is an option of sockets in the kernel (socket(7), tcp(7), ip(7), ipv6(7)).
type socketOption struct {
	level, name int
	// unit is how many units of the guest are one of the kernel: durations are nanoseconds and seconds.
	unit uint64
	// max and initial are values of the kernel. Larger values of a guest mean max, as the WIT allows. initial is the value
	// before the socket is connected.
	max, initial uint64
	// doubled means that the kernel returns twice the value that was set.
	doubled bool
}

const nanoseconds = 1e9

var (
	optKeepAlive         = socketOption{level: unix.SOL_SOCKET, name: unix.SO_KEEPALIVE, unit: 1, max: 1}
	optKeepAliveIdle     = socketOption{level: unix.IPPROTO_TCP, name: unix.TCP_KEEPIDLE, unit: nanoseconds, max: 32767, initial: 7200}
	optKeepAliveInterval = socketOption{level: unix.IPPROTO_TCP, name: unix.TCP_KEEPINTVL, unit: nanoseconds, max: 32767, initial: 75}
	optKeepAliveCount    = socketOption{level: unix.IPPROTO_TCP, name: unix.TCP_KEEPCNT, unit: 1, max: 127, initial: 9}
	optHopLimit4         = socketOption{level: unix.IPPROTO_IP, name: unix.IP_TTL, unit: 1, max: 255, initial: 64}
	optHopLimit6         = socketOption{level: unix.IPPROTO_IPV6, name: unix.IPV6_UNICAST_HOPS, unit: 1, max: 255, initial: 64}
	// The kernel limits the sizes of buffers further, to net.core.rmem_max and wmem_max.
	optReceiveBuffer = socketOption{level: unix.SOL_SOCKET, name: unix.SO_RCVBUF, unit: 1, max: 1 << 20, initial: 212992, doubled: true}
	optSendBuffer    = socketOption{level: unix.SOL_SOCKET, name: unix.SO_SNDBUF, unit: 1, max: 1 << 20, initial: 212992, doubled: true}
)

// hopLimit returns the option of the family.
func (f family) hopLimit() socketOption {
	if f == ipv4 {
		return optHopLimit4
	}
	return optHopLimit6
}

// socketOptions are the options that a guest has set. Options of a socket that is not connected yet take effect when it
// is.
type socketOptions map[socketOption]int

// apply sets the options of a new socket.
func (o socketOptions) apply(s Socket) error {
	return onDescriptorOf(s, func(fd int) error {
		for option, v := range maps.All(o) {
			if err := unix.SetsockoptInt(fd, option.level, option.name, v); err != nil {
				return err
			}
		}
		return nil
	})
}

// set sets an option of a socket, which has the given descriptors so far.
func (o socketOptions) set(option socketOption, value uint64, sockets []Socket) error {
	v := int(min((value-1)/option.unit+1, option.max)) // rounded up
	if value == 0 {
		v = 0
	}
	for _, s := range sockets {
		if err := onDescriptorOf(s, func(fd int) error { return unix.SetsockoptInt(fd, option.level, option.name, v) }); err != nil {
			return errorOf(err)
		}
	}
	o[option] = v
	return nil
}

// get returns an option of a socket.
func (o socketOptions) get(option socketOption, sockets []Socket) (uint64, error) {
	v, set := o[option]
	if !set {
		v = int(option.initial)
	}
	if len(sockets) > 0 {
		if err := onDescriptorOf(sockets[0], func(fd int) (err error) {
			v, err = unix.GetsockoptInt(fd, option.level, option.name)
			return err
		}); err != nil {
			return 0, errorOf(err)
		}
		if option.doubled {
			v /= 2
		}
	}
	return uint64(v) * option.unit, nil
}

// withOptions is a socket of either kind.
type withOptions interface {
	settings() (family, socketOptions)
	// sockets returns the connected sockets.
	sockets() []Socket
}

// value is a type of WIT that an option can have.
type value struct {
	read  func(r *wit.Reader) uint64
	write func(dst []byte, v uint64) []byte
}

var (
	boolValue = value{
		func(r *wit.Reader) uint64 {
			if r.Bool() {
				return 1
			}
			return 0
		},
		func(dst []byte, v uint64) []byte { return wit.AppendBool(dst, v != 0) },
	}
	u8Value = value{
		func(r *wit.Reader) uint64 { return uint64(r.U8()) },
		func(dst []byte, v uint64) []byte { return wit.AppendU8(dst, uint8(v)) },
	}
	u32Value = value{
		func(r *wit.Reader) uint64 { return uint64(r.U32()) },
		func(dst []byte, v uint64) []byte { return wit.AppendU32(dst, uint32(v)) },
	}
	u64Value = value{(*wit.Reader).U64, wit.AppendU64}
)

// optionFuncs returns the functions that get and set an option. of returns the option for a family.
func optionFuncs[S withOptions](resource, name, setter string, t value, of func(family) socketOption) map[string]Func {
	return map[string]Func{
		"[method]" + resource + "." + name: socketMethod(func(c *Call, s S) error {
			f, o := s.settings()
			v, err := o.get(of(f), s.sockets())
			if err != nil {
				return err
			}
			c.OK()
			c.Out = t.write(c.Out, v)
			return nil
		}),
		"[method]" + resource + "." + setter: socketMethod(func(c *Call, s S) error {
			f, o := s.settings()
			option, v := of(f), t.read(c.In)
			if v == 0 && option != optKeepAlive {
				return CodeInvalidArgument
			}
			if err := o.set(option, v, s.sockets()); err != nil {
				return err
			}
			c.OK()
			return nil
		}),
	}
}

// always returns the option for either family.
func always(o socketOption) func(family) socketOption { return func(family) socketOption { return o } }
