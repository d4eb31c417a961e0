package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tripod-run/tripod/test/harness"
)

// TestEdgeSecure: the embedded broker with TLS only, with users and their realms, and with the newer form of topics.
func TestEdgeSecure(t *testing.T) {
	dir := t.TempDir()
	cert, key := selfSigned(t, dir)
	passwords := map[string]string{}
	for _, user := range []string{"node", "guest"} {
		passwords[user] = filepath.Join(dir, user)
		if err := os.WriteFile(passwords[user], []byte(user+"'s secret\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	address := harness.FreeAddress(t)
	broker := map[string]any{
		"broker.address": "", "broker.tls_address": address, "broker.certificate": cert, "broker.key": key,
		"broker.user": []map[string]any{
			{"name": "node", "password_file": passwords["node"], "realms": []string{"farm", "app"}},
			{"name": "guest", "password_file": passwords["guest"], "read": []string{"app/#"}},
		},
	}
	party := func(section string) map[string]any {
		return map[string]any{section + ".user": "node", section + ".password_file": passwords["node"], section + ".ca": cert,
			section + ".realm": "farm", section + ".topics": "nested"}
	}
	d := harness.StartDaemon(t, harness.Edge(t, address, ""), func(d *harness.Daemon) {
		for _, keys := range []map[string]any{broker, party("edge")} {
			for k, v := range keys {
				harness.Set(k, v)(d)
			}
		}
	})
	o := harness.StartOrchestratorWith(t, "mqtts://"+address, party("orchestrator"))
	o.WaitRuntime("wasm", "A")
	as := func(user string, args ...string) (string, error) {
		return o.Edge(append(args, "--realm", "farm", "--ca", cert, "--user", user, "--password-file", passwords[user], "--timeout", "10s")...)
	}
	relay, err := as("node", "run", relayModule, "--name", "relay", "--channel", "in=app/in:r:1", "--channel", "out=app/out:w:1")
	if err != nil {
		t.Fatal(err)
	}
	heard := make(chan string, 1)
	go func() {
		out, err := as("guest", "sub", "--count", "1", "app/out")
		heard <- fmt.Sprint(out, err)
	}()
	harness.Eventually(t, waitLimit, func() error {
		if _, err := as("node", "pub", "--qos", "1", "app/in", "for the guest"); err != nil {
			t.Fatal(err)
		}
		select {
		case out := <-heard:
			if out != "FOR THE GUEST<nil>" {
				t.Errorf("message to the guest: got %q, want FOR THE GUEST", out)
			}
			return nil
		case <-time.After(200 * time.Millisecond): // pacing between two messages
			return fmt.Errorf("the guest has received no message")
		}
	})
	if out, err := as("guest", "sub", "--count", "1", "farm/#"); err == nil || !strings.Contains(err.Error(), "farm/#") {
		t.Errorf("subscription outside the guest's realm: got %q, error %v; want a refusal", out, err)
	}
	if _, err := o.Edge("pub", "app/in", "x", "--ca", cert, "--user", "node", "--password-file", passwords["guest"], "--timeout",
		"5s"); err == nil {
		t.Error("connection with a wrong password succeeded, want an error")
	}
	if _, err := o.Edge("pub", "app/in", "x", "--user", "node", "--password-file", passwords["node"], "--timeout", "5s"); err == nil {
		t.Error("connection without the CA succeeded, want an error")
	}
	if _, err := as("node", "stop", relay); err != nil {
		t.Fatal(err)
	}
	if log := d.DaemonLog(); strings.Contains(log, "secret") {
		t.Error("the daemon's log contains a password")
	}
}

// selfSigned creates a self-signed certificate for 127.0.0.1.
func selfSigned(t *testing.T, dir string) (cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "broker"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter:    time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "EC PRIVATE KEY", Bytes: raw}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}

// TestEdgeOldProtocol: manager, orchestrator and client work over MQTT 3.1.1, with both brokers.
func TestEdgeOldProtocol(t *testing.T) {
	for _, mosquitto := range []bool{false, true} {
		t.Run(map[bool]string{false: "embedded", true: "mosquitto"}[mosquitto], func(t *testing.T) {
			n := &edgeNode{T: t, addr: harness.FreeAddress(t)}
			url := ""
			if mosquitto {
				url = "mqtt://" + n.addr
			}
			n.d = harness.NewDaemon(t, harness.Edge(t, n.addr, url), harness.Set("edge.protocol", 4))
			if mosquitto {
				n.m = harness.StartMosquitto(t, n.addr)
			}
			n.d.Start()
			n.o = harness.StartOrchestratorWith(t, "mqtt://"+n.addr, map[string]any{"orchestrator.protocol": 4})
			n.o.WaitRuntime("wasm", "A")
			n.sub = harness.Subscribe(t, n.addr, "app/#")
			first := n.relay("first", "app/a", "app/b", "--protocol", "4")
			second := n.relay("second", "app/b", "app/c", "--protocol", "4")
			for i := range 3 {
				n.relays("app/a", "app/c", fmt.Sprintf("message %d", i))
			}
			for i := range 3 {
				n.sub.Wait("app/b", fmt.Sprintf("MESSAGE %d", i)) // the copy for the broker, which can come after the second answer
				if got := n.count("app/b", fmt.Sprintf("MESSAGE %d", i)); got != 1 {
					t.Errorf("message %d in app/b: got %d copies, want 1", i, got)
				}
				if got := n.count("app/c", fmt.Sprintf("MESSAGE %d", i)); got != 1 {
					t.Errorf("message %d in app/c: got %d copies, want 1; the broker must not send it to the node too", i, got)
				}
			}
			n.o.MustEdge("stop", first, second, "--protocol", "4")
		})
	}
}
