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

// advertInterval is the interval of unsolicited router advertisements (RFC 4861, MaxRtrAdvInterval).
const advertInterval = 10 * time.Minute

// Limits for each guest: how many frames are read, and how many log lines about unanswered messages are written. Each
// limit is a rate per second and a burst.
const (
	frameRate, frameBurst           = 100, 200
	unansweredRate, unansweredBurst = 0.1, 5
)

// Config holds settings for the guests in addition to their Interfaces.
type Config struct {
	// Servers and Searches are the pod's resolver configuration, for both families. Invalid entries are ignored.
	Servers, Searches []string
	// Hostname is the guest's name. If it is "", no name is sent.
	Hostname string
	// Logger can be nil.
	Logger *slog.Logger
}

// Responder configures a pod's guest until Close. It answers DHCPv4, DHCPv6 and router solicitations on the taps; only
// the guest receives these answers. It keeps no state: a new Responder, in any process, gives the same answers. If a
// tap disappears, the Responder stops serving it without an error.
type Responder struct {
	log     *slog.Logger
	sockets []*packetSocket
	work    sync.WaitGroup
	life    context.Context // canceled by Close
	end     context.CancelFunc
	close   sync.Once
}

// Serve starts a Responder for interfaces that Wire or Read returned. It ignores interfaces without an address. It
// returns ErrNotFound if the namespace or a tap does not exist.
func Serve(ctx context.Context, netns string, interfaces []Interface, cfg Config) (*Responder, error) {
	r := &Responder{log: cfg.Logger}
	r.life, r.end = context.WithCancel(context.Background())
	if r.log == nil {
		r.log = slog.New(slog.DiscardHandler)
	}
	cfg.Searches = domains(cfg.Searches)
	err := inNetns(ctx, netns, func(h *netlink.Handle) error {
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

// Close stops the Responder and waits until it has stopped. Guests keep their configuration.
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
		return fmt.Errorf("MAC of %s: %w", i.Link, err)
	}
	tap, err := h.LinkByName(i.Tap)
	if err != nil {
		return linkError(i.Tap, err)
	}
	port, err := listenPacket(i.Tap, tap.Attrs().Index, guestFilter)
	if err != nil {
		return err
	}
	r.sockets = append(r.sockets, port)
	g := &guest{log: r.log.With("interface", i.Link, "mac", i.MAC), unanswered: rate.NewLimiter(unansweredRate, unansweredBurst), mac: mac,
		tap: port}
	if len(i.addrs4()) > 0 {
		g.v4 = newServer4(i, mac, cfg)
	}
	if len(i.addrs6()) > 0 {
		g.v6 = newServer6(i, mac, cfg)
	}
	if g.v6 != nil && g.v6.proxiesGateway() {
		link, err := h.LinkByName(i.Link)
		if err != nil {
			return linkError(i.Link, err)
		}
		if g.wire, err = listenPacket(i.Link, link.Attrs().Index, advertFilter); err != nil {
			return err
		}
		r.sockets = append(r.sockets, g.wire)
		r.work.Go(func() { g.wire.receive(r.life, g.handleWireFrame) })
	}
	r.work.Go(func() { port.receive(r.life, g.handleGuestFrame) })
	if g.v6 != nil {
		r.work.Go(func() { r.advertise(g) })
	}
	return nil
}

// advertise sends an advertisement every advertInterval, because an advertised default route expires after
// routerLifetime.
func (r *Responder) advertise(g *guest) {
	tick := time.NewTicker(advertInterval)
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

// guest is the peer at a tap.
type guest struct {
	log *slog.Logger
	// unanswered limits the log lines about messages without an answer.
	unanswered *rate.Limiter
	mac        net.HardwareAddr
	tap        *packetSocket
	v4         *server4 // nil without an IPv4 address
	v6         *server6 // nil without an IPv6 address
	// wire listens on the pod's interface for the advertisements of a gateway that v6 proxies. It is nil if v6 proxies
	// none.
	wire *packetSocket
}

// handleGuestFrame answers a frame from the guest.
func (g *guest) handleGuestFrame(data []byte) {
	f, ok := parseFrame(data)
	if !ok || f.src != [6]byte(g.mac) {
		return
	}
	switch {
	case g.v4 != nil && f.isUDP(dhcp4Server) && f.from.Is4():
		answer, what := g.v4.answer(f.payload)
		g.logExchange("DHCPv4", what, answer != nil)
		g.send(g.tap, answer)
	case g.v6 != nil && f.isUDP(dhcp6Server) && f.from.Is6():
		answer, what := g.v6.answer(f)
		g.logExchange("DHCPv6", what, answer != nil)
		g.send(g.tap, answer)
	case g.v6 != nil && f.isICMP6(routerSolicit):
		g.send(g.tap, g.v6.answerSolicit(f))
	case g.wire != nil && f.isICMP6(ndSolicit):
		g.send(g.wire, g.v6.solicitGateway(f))
	}
}

// handleWireFrame forwards the gateway's advertisements of itself to the guest.
func (g *guest) handleWireFrame(data []byte) {
	if f, ok := parseFrame(data); ok && f.isICMP6(ndAdvert) {
		g.send(g.tap, g.v6.gatewayAdvert(f))
	}
}

func (g *guest) send(to *packetSocket, frame []byte) {
	if frame == nil {
		return
	}
	if err := to.send(frame); err != nil {
		g.log.Debug("sending an answer to the guest failed", "err", err) // the guest retries
	}
}

// logExchange logs an exchange, as a warning if the message was not answered. Warnings are rate-limited.
func (g *guest) logExchange(protocol, exchange string, answered bool) {
	switch {
	case exchange == "":
	case answered:
		g.log.Debug(protocol, "exchange", exchange)
	case g.unanswered.Allow():
		g.log.Warn(protocol+" message from the guest not answered", "exchange", exchange)
	}
}

// packetSocket is an AF_PACKET socket on one interface. It sees frames before the filters do, and can send.
type packetSocket struct {
	file  *os.File
	index int
}

// listenPacket opens a socket in the calling thread's namespace. The socket receives the frames that the given program
// accepts.
//
// The socket must be for all protocols, because a socket for one protocol receives frames only after the filters, and
// the filters leave none for it. The program is attached before the socket is bound, so that no other frames are
// queued.
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
		return nil, fmt.Errorf("listen on %s: %w", name, err)
	}
	return &packetSocket{file: os.NewFile(uintptr(fd), name), index: index}, nil
}

func networkOrder(v uint16) uint16 { return v<<8 | v>>8 }

// maxFrame is the size of the receive buffer. Longer frames are ignored.
const maxFrame = 4096

// receive calls handle with each frame until the socket is closed, at most frameRate times per second. The kernel drops
// excess frames.
func (s *packetSocket) receive(life context.Context, handle func([]byte)) {
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
		// Ignore an error: when the interface goes down or disappears, the kernel returns ENETDOWN, but only once.
		if failure == nil && n <= len(buf) {
			handle(buf[:n])
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

// addrsOf returns the valid resolver addresses of one family.
func addrsOf(servers []string, is func(netip.Addr) bool) []net.IP {
	var all []net.IP
	for _, s := range servers {
		if addr, err := netip.ParseAddr(s); err == nil && is(addr.Unmap()) {
			all = append(all, addr.Unmap().AsSlice())
		}
	}
	return all
}

// domains returns the search domains that fit DNS's wire format: labels of 1 to 63 bytes, 255 in total.
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
