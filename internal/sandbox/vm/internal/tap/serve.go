package tap

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"
)

// advertEvery is how often a router is advertised without being asked for (RFC 4861, MaxRtrAdvInterval).
const advertEvery = 10 * time.Minute

// A guest may talk as much as it likes; it is listened to within bounds, in frames and in log lines per second.
const (
	frameRate, frameBurst = 100, 200
	oddRate, oddBurst     = 0.1, 5
)

// Config is what the guests are told beside their Interface.
type Config struct {
	// Servers and Searches are the pod's resolver configuration, of both families; what is no address or no domain is
	// passed over.
	Servers, Searches []string
	// Hostname is the guest's name; "" tells none.
	Hostname string
	// Logger, or nil for none.
	Logger *slog.Logger
}

// Responder configures the guest of a pod, for as long as it is not closed: it answers DHCPv4, DHCPv6 and router
// solicitations at the taps. Nothing but the guest hears it. It keeps nothing: one that takes the place of another, in
// another process too, gives the same answers. A tap that goes away ends what is done for it, quietly.
type Responder struct {
	log     *slog.Logger
	sockets []*packetSocket
	work    sync.WaitGroup
	life    context.Context // ends with Close
	end     context.CancelFunc
	close   sync.Once
}

// Serve starts a Responder for interfaces of Wire or Read; those without an address, and those of the configuration that
// are none, are passed over. ErrNotFound: the namespace or a tap is gone.
func Serve(ctx context.Context, netns string, interfaces []Interface, cfg Config) (*Responder, error) {
	r := &Responder{log: cfg.Logger}
	r.life, r.end = context.WithCancel(context.Background())
	if r.log == nil {
		r.log = slog.New(slog.DiscardHandler)
	}
	cfg.Searches = domains(cfg.Searches)
	err := inside(ctx, netns, func(h *netlink.Handle) error {
		for _, i := range interfaces {
			if len(i.Addrs) == 0 {
				continue
			}
			if err := r.serveOne(h, i, cfg); err != nil {
				return fmt.Errorf("%s: %w", i.Tap, err)
			}
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("serve the guest of %s: %w", netns, err), r.Close())
	}
	return r, nil
}

// Close ends the Responder and waits for it. Guests keep what they were told.
func (r *Responder) Close() error {
	var err error
	r.close.Do(func() {
		r.end()
		for _, s := range r.sockets {
			err = errors.Join(err, s.file.Close())
		}
	})
	r.work.Wait()
	return err
}

func (r *Responder) serveOne(h *netlink.Handle, i Interface, cfg Config) error {
	mac, err := net.ParseMAC(i.MAC)
	if err != nil {
		return fmt.Errorf("%w: of %s", err, i.Link)
	}
	tap, err := h.LinkByName(i.Tap)
	if err != nil {
		return linkError(i.Tap, err)
	}
	port, err := listenPacket(i.Tap, tap.Attrs().Index, fromGuest)
	if err != nil {
		return err
	}
	r.sockets = append(r.sockets, port)
	g := &guest{log: r.log.With("interface", i.Link, "mac", i.MAC), odd: rate.NewLimiter(oddRate, oddBurst), mac: mac, tap: port}
	if len(i.addrs4()) > 0 {
		g.v4 = newServer4(i, mac, cfg)
	}
	if len(i.addrs6()) > 0 {
		g.v6 = newServer6(i, mac, cfg)
	}
	if g.v6 != nil && g.v6.stands() {
		link, err := h.LinkByName(i.Link)
		if err != nil {
			return linkError(i.Link, err)
		}
		if g.wire, err = listenPacket(i.Link, link.Attrs().Index, neighbourAdverts); err != nil {
			return err
		}
		r.sockets = append(r.sockets, g.wire)
		r.work.Go(func() { g.wire.receive(r.life, g.heardOnWire) })
	}
	r.work.Go(func() { port.receive(r.life, g.heard) })
	if g.v6 != nil {
		r.work.Go(func() { r.advertise(g) })
	}
	return nil
}

// advertise keeps the guest's default route alive: an advertisement holds for some hours.
func (r *Responder) advertise(g *guest) {
	tick := time.NewTicker(advertEvery)
	defer tick.Stop()
	for {
		select {
		case <-r.life.Done():
			return
		case <-tick.C:
			g.send(g.tap, g.v6.advertisement(allNodes, groupMAC(allNodes)))
		}
	}
}

// guest is the other end of a tap.
type guest struct {
	log *slog.Logger
	// odd bounds what is logged of messages that get no answer.
	odd *rate.Limiter
	mac net.HardwareAddr
	tap *packetSocket
	v4  *server4 // nil: no address of the family
	v6  *server6
	// wire is the pod's interface, where the gateway is that v6 stands for; else nil.
	wire *packetSocket
}

// heard answers a frame of the guest's.
func (g *guest) heard(data []byte) {
	f, ok := parseFrame(data)
	if !ok || f.src != [6]byte(g.mac) {
		return
	}
	switch {
	case g.v4 != nil && f.isUDP(dhcp4Server) && f.from.Is4():
		answer, what := g.v4.answer(f.payload)
		g.tell("DHCPv4", what, answer != nil)
		g.send(g.tap, answer)
	case g.v6 != nil && f.isUDP(dhcp6Server) && f.from.Is6():
		answer, what := g.v6.answer(f)
		g.tell("DHCPv6", what, answer != nil)
		g.send(g.tap, answer)
	case g.v6 != nil && f.isICMP6(routerSolicit):
		g.send(g.tap, g.v6.solicited(f))
	case g.wire != nil && f.isICMP6(ndSolicit):
		g.send(g.wire, g.v6.seek(f))
	}
}

// heardOnWire passes on what the gateway says of itself.
func (g *guest) heardOnWire(data []byte) {
	if f, ok := parseFrame(data); ok && f.isICMP6(ndAdvert) {
		g.send(g.tap, g.v6.found(f))
	}
}

func (g *guest) send(to *packetSocket, frame []byte) {
	if frame == nil {
		return
	}
	if err := to.send(frame); err != nil {
		g.log.Debug("an answer to the guest was not sent", "err", err) // it asks again
	}
}

// tell logs an exchange: what was not answered deserves more attention, but not more than some.
func (g *guest) tell(protocol, exchange string, answered bool) {
	switch {
	case exchange == "":
	case answered:
		g.log.Debug(protocol, "exchange", exchange)
	case g.odd.Allow():
		g.log.Warn(protocol+": a message of the guest's is not answered", "exchange", exchange)
	}
}

// packetSocket is an AF_PACKET socket at one interface, which sees frames before the filters do and may send.
type packetSocket struct {
	file  *os.File
	index int
}

// listenPacket opens a socket in the calling thread's namespace for the frames that the program selects.
//
// It must be one for all protocols: those for a single one are served after the filters, which leave nothing. The program
// is attached before the socket is bound, so that nothing else is queued.
func listenPacket(name string, index int, program func() ([]unix.SockFilter, error)) (*packetSocket, error) {
	filter, err := program()
	if err != nil {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open a packet socket: %w", err)
	}
	err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: networkOrder(unix.ETH_P_ALL), Ifindex: index})
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("listen at %s: %w", name, err)
	}
	return &packetSocket{file: os.NewFile(uintptr(fd), name), index: index}, nil
}

func networkOrder(v uint16) uint16 { return v<<8 | v>>8 }

// maxFrame bounds what is read of a frame; longer ones are none of ours.
const maxFrame = 4096

// receive hands over frames until the socket is closed, not faster than the bounds: the kernel drops the rest.
func (s *packetSocket) receive(life context.Context, hear func([]byte)) {
	pace := rate.NewLimiter(frameRate, frameBurst)
	raw, err := s.file.SyscallConn()
	if err != nil {
		return // closed
	}
	buf := make([]byte, maxFrame)
	for {
		var n int
		var failure error
		err := raw.Read(func(fd uintptr) bool {
			n, _, failure = unix.Recvfrom(int(fd), buf, unix.MSG_TRUNC)
			return failure != unix.EAGAIN
		})
		if err != nil {
			return // closed
		}
		// ENETDOWN is returned once when the interface goes down or away.
		if failure == nil && n <= len(buf) {
			hear(buf[:n])
		}
		if pace.Wait(life) != nil {
			return
		}
	}
}

func (s *packetSocket) send(frame []byte) error {
	raw, err := s.file.SyscallConn()
	if err != nil {
		return err
	}
	to := &unix.SockaddrLinklayer{Ifindex: s.index, Halen: 6}
	copy(to.Addr[:], frame[:6])
	var failure error
	err = raw.Control(func(fd uintptr) { failure = unix.Sendto(int(fd), frame, 0, to) })
	return errors.Join(err, failure)
}

// addrsOf parses resolver addresses of one family; what is no address is passed over.
func addrsOf(servers []string, is func(netip.Addr) bool) []net.IP {
	var all []net.IP
	for _, s := range servers {
		if addr, err := netip.ParseAddr(s); err == nil && is(addr.Unmap()) {
			all = append(all, addr.Unmap().AsSlice())
		}
	}
	return all
}

// domains are the search domains that can be told in DNS's form: labels of 1 to 63 bytes, 255 in all.
func domains(searches []string) []string {
	var all []string
	for _, s := range searches {
		s = strings.TrimSuffix(s, ".")
		bad := func(label string) bool { return label == "" || len(label) > 63 }
		if len(s) < 254 && !slices.ContainsFunc(strings.Split(s, "."), bad) {
			all = append(all, s)
		}
	}
	return all
}
