package host

import (
	"strings"
	"testing"
)

// TestService: the installed package runs a service that is ready, and the host passes the check.
func TestService(t *testing.T) {
	if out := node.run(t, "systemctl is-active tripod; systemctl is-failed tripod || true"); out != "active\nactive\n" {
		t.Fatalf("state of the service: %q", out)
	}
	out := node.run(t, "tripod check")
	for line := range strings.Lines(out) {
		t.Log(strings.TrimSpace(line))
	}
}
