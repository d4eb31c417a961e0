package sandbox

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const stub = "# This is /run/systemd/resolve/stub-resolv.conf\nnameserver 127.0.0.53\noptions edns0 trust-ad\nsearch lan\n"

// TestNodeDNS compares what pods get with the files of nodes.
func TestNodeDNS(t *testing.T) {
	for name, c := range map[string]struct {
		file, upstream string
		want           string // servers; searches; options
		notice         string // a part
	}{
		"plain": {file: "nameserver 192.0.2.1\nnameserver 2001:db8::1\nsearch a b\noptions ndots:2\noptions trust-ad\n",
			upstream: "nameserver 192.0.2.9\n", want: "192.0.2.1 2001:db8::1; a b; ndots:2 trust-ad"},
		"systemd-resolved": {file: stub, upstream: "nameserver 192.0.2.9\nnameserver 192.0.2.8\nsearch other\n",
			want: "192.0.2.9 192.0.2.8; lan; edns0"},
		"systemd-resolved, DNS off": {file: stub, upstream: "nameserver 127.0.0.1\n", want: "; lan; edns0", notice: "no name server"},
		"dnsmasq":                   {file: "nameserver 127.0.1.1\n", want: "; ; ", notice: `["127.0.1.1"]`},
		"dnsmasq of 127.0.0.1":      {file: "nameserver 127.0.0.1\nnameserver ::1\n", want: "; ; ", notice: "no name server"},
		"mixed": {file: "nameserver 127.0.0.1\nnameserver 192.0.2.1\nnameserver ::1\n", upstream: "nameserver 192.0.2.9\n",
			want: "192.0.2.1; ; ", notice: "127.0.0.1 ::1 of"},
		"comments": {file: "#nameserver 192.0.2.2\n; nameserver 192.0.2.3\n\tnameserver 192.0.2.1 # of the router\nnameserver\n",
			want: "192.0.2.1; ; "},
		"scope": {file: "nameserver fe80::1%eth0\nnameserver 2001:db8::1\n", want: "2001:db8::1; ; ", notice: "fe80::1%eth0"},
		"mapped and unspecified": {file: "nameserver ::ffff:127.0.0.1\nnameserver 0.0.0.0\nnameserver 169.254.169.253\n",
			want: "169.254.169.253; ; ", notice: "0.0.0.0"},
		"no address":             {file: "nameserver ns.example\n", want: "; ; ", notice: "ns.example"},
		"missing":                {want: "; ; ", notice: "no name server"},
		"missing, with resolved": {upstream: "nameserver 192.0.2.9\n", want: "192.0.2.9; ; "},
		"the last search counts": {file: "nameserver 192.0.2.1\nsearch a\ndomain c\n", want: "192.0.2.1; c; "},
		"no search domain":       {file: "nameserver 192.0.2.1\nsearch .\n", want: "192.0.2.1; ; "},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for file, text := range map[string]string{ResolvConf: c.file, upstreamConf: c.upstream} {
				if text == "" {
					continue
				}
				at := filepath.Join(root, file)
				if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(at, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			dns, notice, err := NodeDNS(root)
			if err != nil {
				t.Fatal(err)
			}
			got := strings.Join([]string{strings.Join(dns.Servers, " "), strings.Join(dns.Searches, " "), strings.Join(dns.Options, " ")}, "; ")
			if got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
			if (notice == "") != (c.notice == "") || !strings.Contains(notice, c.notice) {
				t.Errorf("notice: got %q, want one with %q", notice, c.notice)
			}
		})
	}
}

// TestRequestedDNS checks that the request's servers stay, wherever they lead.
func TestRequestedDNS(t *testing.T) {
	asked := &runtimeapi.DNSConfig{Servers: []string{"127.0.0.53"}}
	dns, notice, err := (&Pod{Config: &runtimeapi.PodSandboxConfig{DnsConfig: asked}}).DNS()
	if dns != asked || notice != "" || err != nil {
		t.Errorf("got %v, %q, %v, want the request's", dns, notice, err)
	}
}
