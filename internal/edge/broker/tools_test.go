package broker_test

import (
	"bufio"
	"context"
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
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/crypto/bcrypt"

	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
)

// tool runs one of mosquitto's clients against an address.
func tool(ctx context.Context, name, address string, args ...string) *exec.Cmd {
	host, port, _ := net.SplitHostPort(address)
	return exec.CommandContext(ctx, name, append([]string{"-h", host, "-p", port}, args...)...)
}

// TestMosquittoClients uses mosquitto_pub and mosquitto_sub with the embedded broker. Each publisher's messages arrive in
// order, each once. Between publishers there is no order (MQTT 5.0 §4.6): with QoS 0 the first mosquitto_pub ends once it
// has written its messages, and the second one's can reach the broker before the broker has read them all.
func TestMosquittoClients(t *testing.T) {
	for _, version := range []string{"5", "311", "31"} {
		for _, qos := range []string{"0", "1", "2"} {
			t.Run("version "+version+" qos "+qos, func(t *testing.T) {
				t.Parallel()
				ctx := patient(t)
				s := embedded(t, broker.Config{})
				const count = 300 // far over mosquitto_sub's receive maximum
				sub := tool(ctx, "mosquitto_sub", s.address, "-V", version, "-q", qos, "-t", "t/#", "-C", fmt.Sprint(count+1), "-F", "%t %q %r %p")
				out, err := sub.StdoutPipe()
				require.NoError(t, err)
				require.NoError(t, sub.Start())
				require.Eventually(t, func() bool { return s.stats().Subscriptions == 1 }, patience, time.Millisecond)
				pub := tool(ctx, "mosquitto_pub", s.address, "-V", version, "-q", qos, "-t", "t/live", "-l")
				var in strings.Builder
				var want, got, end []string
				for i := range count {
					fmt.Fprintf(&in, "line %d\n", i)
					want = append(want, fmt.Sprintf("t/live %s 0 line %d", qos, i))
				}
				pub.Stdin = strings.NewReader(in.String())
				b, err := pub.CombinedOutput()
				require.NoError(t, err, "%s", b)
				b, err = tool(ctx, "mosquitto_pub", s.address, "-V", version, "-q", qos, "-t", "t/kept", "-r", "-m", "end").CombinedOutput()
				require.NoError(t, err, "%s", b)
				for lines := bufio.NewScanner(out); lines.Scan(); {
					to := &got
					if strings.HasPrefix(lines.Text(), "t/kept ") {
						to = &end
					}
					*to = append(*to, lines.Text())
				}
				require.NoError(t, sub.Wait())
				assert.Equal(t, want, got)
				assert.Equal(t, []string{"t/kept " + qos + " 0 end"}, end)
				b, err = tool(ctx, "mosquitto_sub", s.address, "-V", version, "-q", qos, "-t", "t/#", "-C", "1", "-F", "%t %q %r %p").CombinedOutput()
				require.NoError(t, err)
				assert.Equal(t, "t/kept "+qos+" 1 end\n", string(b), "retained")
			})
		}
	}
}

// certificates makes a CA and, for each name, a certificate signed by it: NAME.crt and NAME.key in the directory.
func certificates(t testing.TB, names ...string) (dir string) {
	dir = t.TempDir()
	serial := int64(0)
	make := func(name string, parent *x509.Certificate, signer *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey) {
		serial++
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		require.NoError(t, err)
		c := &x509.Certificate{
			SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour),
			NotAfter:    time.Now().Add(time.Hour),
			IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, BasicConstraintsValid: true, IsCA: parent == nil,
			KeyUsage:    x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		}
		if parent == nil {
			parent, signer = c, key
		}
		der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
		require.NoError(t, err)
		pk, err := x509.MarshalECPrivateKey(key)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(dir, name+".crt"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name+".key"), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: pk}),
			0o600))
		return c, key
	}
	ca, key := make("ca", nil, nil)
	for _, name := range names {
		make(name, ca, key)
	}
	return dir
}

// TestTLS uses certificates on both sides; the client's common name is its user name.
func TestTLS(t *testing.T) {
	dir := certificates(t, "server", "node-1", "stranger")
	at := func(name string) string { return filepath.Join(dir, name) }
	b, err := broker.New(broker.Config{
		TLSAddress: "127.0.0.1:0", Certificate: at("server.crt"), Key: at("server.key"), ClientCA: at("ca.crt"),
		Users: []broker.User{{Name: "node-1", PasswordFile: at("ca.key"), Realms: []string{"realm"}}},
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close(patient(t))) })
	s := &server{address: b.Addresses()[0]}
	for _, protocol := range []int{5, 4} {
		c, in := connect(t, s,
			mqtt.Config{URL: b.URL(), Protocol: protocol, TLS: mqtt.TLS{CA: at("ca.crt"), Cert: at("node-1.crt"), Key: at("node-1.key")}})
		require.NoError(t, c.Subscribe(patient(t), "realm/#", 1, mqtt.SubscribeOptions{}))
		require.NoError(t, c.Publish(patient(t), "realm/x", 1, false, []byte("by certificate")))
		in.wait(t, "by certificate")
		for name, bad := range map[string]mqtt.TLS{
			"no authority":   {Cert: at("node-1.crt"), Key: at("node-1.key")},
			"no certificate": {CA: at("ca.crt")},
			"no user":        {CA: at("ca.crt"), Cert: at("stranger.crt"), Key: at("stranger.key")},
			"no file":        {CA: at("nothing")},
		} {
			refused, err := mqtt.New(mqtt.Config{URL: b.URL(), Protocol: protocol, TLS: bad})
			require.NoError(t, err)
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			err = refused.WaitConnected(ctx)
			cancel()
			require.Error(t, err, name)
			t.Log(name, err)
			require.NoError(t, refused.Close(patient(t)))
		}
	}
	out, err := tool(patient(t), "mosquitto_pub", s.address, "--cafile", at("ca.crt"), "--cert", at("node-1.crt"), "--key", at("node-1.key"),
		"-q", "1", "-t", "realm/x", "-m", "x").CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// TestUsers: passwords in the clear and hashed, realms, filters, names in filters, wills.
func TestUsers(t *testing.T) {
	dir := t.TempDir()
	hash, err := bcrypt.GenerateFromPassword([]byte("secret"), bcrypt.MinCost)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "hash"), append(hash, '\n'), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "clear"), []byte("pass word\r\n"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "empty"), []byte("\n"), 0o600))
	users := []broker.User{
		{Name: "node", PasswordFile: filepath.Join(dir, "hash"), Realms: []string{"lab", "realm"}},
		{Name: "sensor", PasswordFile: filepath.Join(dir, "clear"), Read: []string{"cmd/%u/#", "all/+"}, Write: []string{"data/%u/%c"}},
		{Name: "cli"},
	}
	s := embedded(t, broker.Config{Users: users})
	ctx := patient(t)
	for _, bad := range [][2]string{{"", ""}, {"node", ""}, {"node", "wrong"}, {"sensor", "pass"}, {"nobody", "secret"}} {
		c, err := mqtt.New(mqtt.Config{URL: s.url(), Username: bad[0], Password: bad[1]})
		require.NoError(t, err)
		short, cancel := context.WithTimeout(ctx, time.Second)
		err = c.WaitConnected(short)
		cancel()
		require.ErrorContains(t, err, "refused", "%v", bad)
		require.NoError(t, c.Close(ctx))
	}
	for _, protocol := range []int{5, 4} {
		node, in := connect(t, s, mqtt.Config{Protocol: protocol, Username: "node", Password: "secret"})
		sensor, _ := connect(t, s,
			mqtt.Config{Protocol: protocol, ClientID: fmt.Sprint("s", protocol), Username: "sensor", Password: "pass word"})
		cli, _ := connect(t, s, mqtt.Config{Protocol: protocol, Username: "cli"})
		for _, try := range []struct {
			c      mqtt.Client
			filter string
			open   bool
		}{
			{node, "lab/#", true}, {node, "realm/+/x", true}, {node, "realm", true}, {node, "#", false}, {node, "+/x", false},
			{node, "other/#", false}, {node, "$SYS/#", false},
			{sensor, "cmd/sensor/x", true}, {sensor, "cmd/node/x", false}, {sensor, "cmd/#", false}, {sensor, "all/+", true},
			{sensor, "all/#", false}, {sensor, "all/1", true}, {sensor, "data/sensor/s5", false},
			{cli, "lab/x", false},
		} {
			err := try.c.Subscribe(ctx, try.filter, 1, mqtt.SubscribeOptions{})
			assert.Equal(t, try.open, err == nil, "%s: %v", try.filter, err)
		}
		if protocol == 5 { // refused, and told so
			require.NoError(t, sensor.Publish(ctx, "lab/x", 1, false, []byte("denied")))
			require.Eventually(t, func() bool { return sensor.Stats().Dropped == 1 }, patience, time.Millisecond)
		}
		require.NoError(t, sensor.Publish(ctx, "lab/x", 0, false, []byte("denied")))
		require.NoError(t, sensor.Publish(ctx, fmt.Sprint("data/sensor/s", protocol), 1, false, []byte("allowed")))
		require.Eventually(t, func() bool { return sensor.Stats().Queued == 0 }, patience, time.Millisecond)
		r := dialRaw(t, s.address) // a will is a message too
		r.send(connectPacket(4, 0x02|0x04|0x80, "w", "lab/will", "denied", "cli"))
		r.read(t)
		r.conn.Close()
		require.NoError(t, node.Publish(ctx, "lab/x", 1, false, []byte("end")))
		assert.Equal(t, []string{"lab/x q1 end"}, in.wait(t, "end"))
	}
	for name, bad := range map[string][]broker.User{
		"twice":    {{Name: "a"}, {Name: "a"}},
		"no name":  {{}},
		"no file":  {{Name: "a", PasswordFile: filepath.Join(dir, "nothing")}},
		"no bytes": {{Name: "a", PasswordFile: filepath.Join(dir, "empty")}},
	} {
		_, err := broker.New(broker.Config{Address: "127.0.0.1:0", Users: bad})
		assert.Error(t, err, name)
	}
}
