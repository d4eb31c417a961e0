package egress

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

func TestRules(t *testing.T) {
	for _, c := range []struct {
		rules, names, addr string
		want               bool
	}{
		{"*", "", "93.184.216.34:443", true},
		{"*", "a.example", "10.0.0.1:80", true},
		{"*:443", "", "93.184.216.34:80", false},
		{"*", "", "127.0.0.1:80", false},
		{"*", "", "[::ffff:127.0.0.1]:80", false},
		{"*", "", "169.254.169.254:80", false},
		{"*", "", "[fd00:ec2::254]:80", false},
		{"*", "", "[fd20:ce::254]:80", false},
		{"*", "", "100.100.100.200:80", false},
		{"*", "", "100.100.100.201:80", true},
		{"*", "", "168.63.129.16:80", false},
		{"168.63.129.16:53", "", "168.63.129.16:53", true},
		{"*", "", "[64:ff9b::169.254.169.254]:80", false},
		{"*", "", "[64:ff9b::100.100.100.200]:80", false},
		{"*", "", "[64:ff9b::8.8.8.8]:80", true},
		{"*", "", "[2002:7f00:1::1]:80", false},
		{"*", "", "[2002:a9fe:a9fe::]:80", false},
		{"*", "", "[2002:808:808::1]:80", true},
		{"64:ff9b::/96", "", "[64:ff9b::127.0.0.1]:80", false},
		{"64:ff9b::169.254.169.254", "", "[64:ff9b::169.254.169.254]:80", true},
		{"a.example", "a.example", "[64:ff9b::10.0.0.1]:80", true},
		{"a.example", "a.example", "[64:ff9b::127.0.0.1]:80", false},
		{"*", "", "[fe80::1]:80", false},
		{"*", "", "0.0.0.0:80", false},
		{"*", "", "[::]:80", false},
		{"*", "", "[::127.0.0.1]:80", false},
		{"*", "", "255.255.255.255:80", false},
		{"*", "", "[ff02::1]:80", false},
		{"*", "", "[2001:db8::1]:80", true},
		{"127.0.0.1:8080", "", "127.0.0.1:8080", true},
		{"127.0.0.1:8080", "", "127.0.0.1:8081", false},
		{"127.0.0.0/8", "", "127.9.9.9:1", true},
		{"0.0.0.0/0", "", "127.0.0.1:80", false},
		{"0.0.0.0/0", "", "8.8.8.8:80", true},
		{"::/0", "", "[::1]:80", false},
		{"::1", "", "[::1]:80", true},
		{"[::1]:80", "", "[::1]:81", false},
		{"169.254.169.254:80", "", "169.254.169.254:80", true},
		{"10.0.0.0/8:5432-5433", "", "10.1.2.3:5433", true},
		{"10.0.0.0/8:5432-5433", "", "10.1.2.3:5434", false},
		{"api.example.com:443", "api.example.com", "1.2.3.4:443", true},
		{"API.Example.com.:443", "api.example.com", "1.2.3.4:443", true},
		{"api.example.com:443", "api.example.com", "127.0.0.1:443", false},
		{"api.example.com:443", "api.example.com", "169.254.169.254:443", false},
		{"api.example.com:443", "", "1.2.3.4:443", false},
		{"api.example.com:443", "xapi.example.com", "1.2.3.4:443", false},
		{"*.example.com:443", "a.b.example.com", "1.2.3.4:443", true},
		{"*.example.com:443", "example.com", "1.2.3.4:443", false},
		{"*.example.com:443", "badexample.com", "1.2.3.4:443", false},
		{"db.prod.svc.cluster.local", "db db.prod.svc.cluster.local", "10.0.0.9:5432", true},
		{"localhost:80", "localhost", "127.0.0.1:80", true},
		{"localhost:80", "localhost", "169.254.169.254:80", false},
		{"a.example:1, 10.0.0.0/8:*", "", "10.0.0.1:9", true},
		{"none", "", "10.0.0.1:9", false},
	} {
		r, err := ParseRules(c.rules)
		if err != nil {
			t.Errorf("ParseRules(%q) = %v", c.rules, err)
			continue
		}
		if got := r.Allows(strings.Fields(c.names), netip.MustParseAddrPort(c.addr)); got != c.want {
			t.Errorf("%q: Allows(%q, %s) = %v, want %v", c.rules, c.names, c.addr, got, c.want)
		}
	}
}

func TestMayResolve(t *testing.T) {
	for _, c := range []struct {
		rules, name string
		port        uint16
		want        bool
	}{
		{"*", "x.example", 1, true}, {"10.0.0.0/8:5", "x.example", 5, true}, {"10.0.0.0/8:5", "x.example", 6, false},
		{"10.0.0.0/8:5", "x.example", 0, true},
		{"a.example", "a.example", 9, true}, {"a.example", "b.example", 9, false}, {"none", "a.example", 9, false},
	} {
		r, err := ParseRules(c.rules)
		if err != nil {
			t.Fatal(err)
		}
		if got := r.MayResolve([]string{c.name}, c.port); got != c.want {
			t.Errorf("%q: MayResolve(%s, %d) = %v", c.rules, c.name, c.port, got)
		}
	}
}

func TestInvalidRules(t *testing.T) {
	for _, text := range []string{"", " ", ",", "a,,b", "a:", "a:0", "a:65536", "a:9-8", "a:x", "10.0.0.1/8", "10.0.0.0/33", "fe80::1%eth0",
		"*.", "a b",
		"http://a", "a/b", "::ffff:1.2.3.4", "*.10.0.0.0/8", strings.Repeat("a", 64), strings.Repeat("a,", 300) + "a"} {
		if _, err := ParseRules(text); !errdefs.IsInvalidArgument(err) {
			t.Errorf("ParseRules(%.20q) = %v, want ErrInvalidArgument", text, err)
		}
	}
}

func FuzzParseRules(f *testing.F) {
	for _, text := range []string{"*", "none", "a.example:443", "[2001:db8::/32]:1-2", "10.0.0.0/8", "*.x:*"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		r, err := ParseRules(text)
		if err != nil {
			return
		}
		if r.Allows(nil, netip.MustParseAddrPort("127.0.0.1:80")) && !strings.Contains(text, "127.") {
			t.Errorf("%q allows loopback", text)
		}
	})
}
