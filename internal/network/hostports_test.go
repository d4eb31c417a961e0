package network

import (
	"net"
	"testing"
)

// TestHostProcess: what listens on a host port is named, and what only uses it is not in the way.
func TestHostProcess(t *testing.T) {
	listen := func(network, address string) int32 {
		if network == "udp" {
			c, err := net.ListenPacket(network, address)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
			return int32(c.LocalAddr().(*net.UDPAddr).Port)
		}
		l, err := net.Listen(network, address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return int32(l.Addr().(*net.TCPAddr).Port)
	}
	loopback, everywhere, six, datagrams := listen("tcp", "127.0.0.1:0"), listen("tcp", ":0"), listen("tcp6", "[::1]:0"),
		listen("udp", "127.0.0.1:0")
	client, err := net.Dial("tcp", listener(t).Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ended := listener(t)
	waiting, err := net.Dial("tcp", ended.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	served, err := ended.Accept()
	if err != nil {
		t.Fatal(err)
	}
	served.Close() // the end that closes first waits, here with the listener's port
	waiting.Close()
	ended.Close()
	outgoing := int32(client.LocalAddr().(*net.TCPAddr).Port)
	for name, c := range map[string]struct {
		mapping     PortMapping
		hostNetwork bool
		want        bool
	}{
		"the same address":               {PortMapping{HostPort: loopback, HostIP: "127.0.0.1"}, false, true},
		"all addresses":                  {PortMapping{HostPort: loopback}, false, true},
		"all IPv4 addresses":             {PortMapping{HostPort: loopback, HostIP: "0.0.0.0"}, false, true},
		"another address":                {PortMapping{HostPort: loopback, HostIP: "127.0.0.2"}, false, false},
		"another protocol":               {PortMapping{HostPort: loopback, Protocol: "UDP"}, false, false},
		"beside it on the host":          {PortMapping{HostPort: loopback}, true, false},
		"the same on the host":           {PortMapping{HostPort: loopback, HostIP: "127.0.0.1"}, true, true},
		"one of all":                     {PortMapping{HostPort: everywhere, HostIP: "127.0.0.1"}, false, true},
		"all, on the host":               {PortMapping{HostPort: everywhere}, true, true},
		"IPv6":                           {PortMapping{HostPort: six}, false, true},
		"IPv6, at its address":           {PortMapping{HostPort: six, HostIP: "::1"}, false, true},
		"UDP":                            {PortMapping{HostPort: datagrams, Protocol: "UDP"}, false, true},
		"TCP beside UDP":                 {PortMapping{HostPort: datagrams}, false, false},
		"the port of a client":           {PortMapping{HostPort: outgoing}, false, false},
		"a connection in TIME_WAIT":      {PortMapping{HostPort: int32(ended.Addr().(*net.TCPAddr).Port)}, false, false},
		"SCTP":                           {PortMapping{HostPort: loopback, Protocol: "SCTP"}, false, false},
		"an address that the node lacks": {PortMapping{HostPort: loopback, HostIP: "192.0.2.1"}, false, false},
	} {
		if got := c.mapping.HostProcess(c.hostNetwork); (got != "") != c.want {
			t.Errorf("%s: HostProcess = %q, want one: %v", name, got, c.want)
		}
	}
}

func listener(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}
