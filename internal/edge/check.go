package edge

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/health"
)

// dialTime bounds the wait for a connection to the broker.
const dialTime = 3 * time.Second

// Check checks what the front door and its runtimes need. If the front door is off, Check returns no findings.
func Check(ctx context.Context, c *config.Config) []health.Finding {
	if !c.Edge.Enabled {
		return nil
	}
	findings := []health.Finding{checkBroker(ctx, c)}
	for key, file := range map[string]string{
		"edge.password_file": c.Edge.PasswordFile, "edge.ca": c.Edge.CA, "edge.certificate": c.Edge.Certificate, "edge.key": c.Edge.Key,
	} {
		if file != "" && unix.Access(file, unix.R_OK) != nil {
			findings = append(findings,
				health.Finding{Subject: key, Required: true, Detail: file + " cannot be read", Remedy: "create the file, or correct the key"})
		}
	}
	findings = append(findings, checkRoots("edge.module_roots", c.Edge.ModuleRoots), checkRoots("edge.dir_roots", c.Edge.DirRoots))
	for _, r := range c.Edge.Runtimes {
		findings = append(findings, checkProgram(r))
	}
	if c.Edge.Wasm.Enabled && !c.Backends.Wasm {
		findings = append(findings,
			health.Finding{Subject: "edge runtime " + c.Edge.Wasm.Name, Detail: "backends.wasm is off, so tripod/wasm is not offered",
				Remedy: "set backends.wasm to true, or edge.wasm.enabled to false"})
	}
	return findings
}

// checkBroker checks that an external broker accepts connections, and that an embedded broker is not open to everybody
// on the network.
func checkBroker(ctx context.Context, c *config.Config) health.Finding {
	f := health.Finding{Subject: "edge broker", OK: true}
	if c.Edge.Broker == config.EmbeddedBroker {
		b := c.Broker
		addresses := []string{b.Address, b.TLSAddress, b.WebSocketAddress, b.WebSocketTLSAddress}
		f.Detail = "embedded, at " + strings.Join(strings.Fields(strings.Join(addresses, " ")), " ")
		if len(b.Users) == 0 && (isRemote(b.Address) || isRemote(b.WebSocketAddress)) {
			f.OK, f.Detail = false, f.Detail+": open to the network without users, so everybody can do everything"
			f.Remedy = "configure users with [[broker.user]], or a loopback address"
		}
		if sessions, ok := askSessions(ctx, c); ok {
			f.Detail += "; " + summary(sessions)
		}
		return f
	}
	u, err := url.Parse(c.Edge.Broker)
	if err != nil {
		return health.Finding{Subject: f.Subject, Detail: err.Error(), Remedy: "correct edge.broker"}
	}
	address := u.Host
	if u.Port() == "" {
		address = net.JoinHostPort(u.Hostname(), map[string]string{"mqtt": "1883", "mqtts": "8883"}[u.Scheme])
	}
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		f.OK, f.Detail, f.Remedy = false, err.Error(), "start the broker, or correct edge.broker; the daemon starts without it and keeps trying"
		return f
	}
	_ = conn.Close() // nothing was sent
	f.Detail = "reachable at " + address
	return f
}

// askSessions asks the embedded broker, if it is running, for its sessions. It connects as the manager would, and returns
// false if that user may not read them.
func askSessions(ctx context.Context, c *config.Config) ([]broker.Session, bool) {
	if c.Broker.Address == "" {
		return nil, false
	}
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	url := "mqtt://" + broker.Reachable(c.Broker.Address)
	if conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", strings.TrimPrefix(url, "mqtt://")); err != nil {
		return nil, false // the daemon is not running
	} else {
		_ = conn.Close() // nothing was sent
	}
	password, err := readPassword(c.Edge.PasswordFile)
	if err != nil {
		return nil, false
	}
	list := make(chan []byte, 1)
	client, err := mqtt.New(mqtt.Config{URL: url, Username: c.Edge.User, Password: password, Handler: func(m mqtt.Message) {
		select {
		case list <- m.Payload:
		default:
		}
	}})
	if err != nil {
		return nil, false
	}
	defer client.Close(ctx)
	if client.WaitConnected(ctx) != nil || client.Subscribe(ctx, broker.SessionsTopic, 0, mqtt.SubscribeOptions{}) != nil {
		return nil, false
	}
	select {
	case text := <-list:
		var sessions []broker.Session
		err := json.Unmarshal(text, &sessions)
		return sessions, err == nil
	case <-ctx.Done():
		return nil, false
	}
}

// summary describes sessions in a few words. The one that has asked for them does not count.
func summary(sessions []broker.Session) string {
	connected, queued := -1, 0
	for _, s := range sessions {
		if s.Connected {
			connected++
		}
		queued += s.Queued
	}
	return fmt.Sprintf("%d clients connected, %d sessions of absent clients, %d messages queued", connected, len(sessions)-connected-1, queued)
}

// isRemote reports whether other machines can reach a listening address. The empty address is none.
func isRemote(address string) bool {
	host, _, err := net.SplitHostPort(address)
	ip := net.ParseIP(host)
	return err == nil && host != "localhost" && (ip == nil || !ip.IsLoopback())
}

func checkRoots(key string, roots []string) health.Finding {
	f := health.Finding{Subject: key, OK: true, Detail: "none"}
	for i, dir := range roots {
		info, err := os.Stat(dir)
		switch {
		case err != nil:
			return health.Finding{Subject: key, Detail: err.Error(), Remedy: "create the directory; until then modules cannot use it"}
		case !info.IsDir():
			return health.Finding{Subject: key, Detail: dir + " is not a directory", Remedy: "correct the key"}
		case i == 0:
			f.Detail = dir
		default:
			f.Detail += ", " + dir
		}
	}
	return f
}

func checkProgram(r config.EdgeRuntime) health.Finding {
	program, _, _ := strings.Cut(r.Command, " ")
	f := health.Finding{Subject: "edge runtime " + r.Name, OK: true, Detail: r.Command}
	if err := unix.Access(program, unix.X_OK); err != nil {
		f.OK, f.Detail, f.Remedy = false, fmt.Sprintf("%s cannot be run: %v", program, err), "install it, or correct its command"
	}
	return f
}
