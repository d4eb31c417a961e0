package e2e

import (
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/stress"
)

// TestW8NoForeignBytes: many clients make streams and calls to two components that share a worker, in every protocol
// over every transport. No client gets another's bytes.
func TestW8NoForeignBytes(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	o := stress.Options{Streams: 64, For: 3 * time.Second}
	if os.Getenv("TRIPOD_TEST_FULL") != "" {
		o.For, o.Messages = time.Minute, 1_000_000
	}
	base := map[string]map[string]string{}
	for image, service := range map[string]string{harness.FaultsC: faults, harness.GreeterC: greeter} {
		pod := d.RunWasm(t, &harness.PodSpec{Name: service, Image: image, Pod: []harness.PodOption{annotate("concurrency", "64")}}).Pod
		cleartext, overTLS := "http://"+net.JoinHostPort(pod.IP(), "80"), "https://"+net.JoinHostPort(pod.IP(), "443")
		base[service] = map[string]string{"h1": cleartext, "h2c": cleartext, "h2": overTLS, "h3": overTLS}
	}
	stress.Run(t, stressed(base), []stress.Transport{
		{Name: "h1", Client: &http.Client{Transport: overTCP(t, (*http.Protocols).SetHTTP1)}, HTTP1: true},
		{Name: "h2c", Client: &http.Client{Transport: overTCP(t, (*http.Protocols).SetUnencryptedHTTP2)}},
		{Name: "h2", Client: &http.Client{Transport: overTCP(t, (*http.Protocols).SetHTTP2)}},
		{Name: "h3", Client: overHTTP3(t, anyCertificate)},
	}, o)
}

// overTCP returns a transport that speaks only one protocol.
func overTCP(t *testing.T, set func(*http.Protocols, bool)) *http.Transport {
	transport := &http.Transport{TLSClientConfig: anyCertificate.Clone(), Protocols: &http.Protocols{}, MaxIdleConnsPerHost: 64}
	set(transport.Protocols, true)
	t.Cleanup(transport.CloseIdleConnections)
	return transport
}

// stressed returns a method of each arity, and their answers.
func stressed(base map[string]map[string]string) []*stress.Method {
	return []*stress.Method{
		{
			Procedure: "/" + faults + "/Echo", Base: base[faults], Type: connect.StreamTypeUnary,
			Exchange: func(words []string) (requests, replies [][]byte) {
				echo := [][]byte{field(nil, 1, words[0])}
				return echo, echo
			},
		}, {
			Procedure: "/" + greeter + "/Collect", Base: base[greeter], Type: connect.StreamTypeClient,
			Exchange: func(words []string) (requests, replies [][]byte) {
				for _, w := range words {
					requests = append(requests, field(nil, 1, w))
				}
				return requests, [][]byte{field(nil, 1, "Hello, "+strings.Join(words, ", ")+"!")}
			},
		}, {
			// The messages have no room for a name, but their number and length depend on the client.
			Procedure: "/" + faults + "/Tick", Base: base[faults], Type: connect.StreamTypeServer,
			Exchange: func(words []string) (requests, replies [][]byte) {
				size := len(strings.Join(words, ""))
				for n := range words {
					replies = append(replies, field(number(nil, 1, n+1), 2, strings.Repeat("t", size)))
				}
				return [][]byte{number(number(nil, 1, len(words)), 3, size)}, replies
			},
		}, {
			Procedure: "/" + faults + "/Mirror", Base: base[faults], Type: connect.StreamTypeBidi,
			Exchange: func(words []string) (requests, replies [][]byte) {
				for _, w := range words {
					requests = append(requests, field(nil, 1, w))
				}
				return requests, requests
			},
		},
	}
}

// field appends a bytes or string field.
func field(b []byte, n protowire.Number, v string) []byte {
	return protowire.AppendString(protowire.AppendTag(b, n, protowire.BytesType), v)
}

// number appends an unsigned integer field.
func number(b []byte, n protowire.Number, v int) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, n, protowire.VarintType), uint64(v))
}
