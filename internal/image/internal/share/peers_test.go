package share

import (
	"strings"
	"testing"
)

// A peer that does not answer delays a pull from the others only for peerGrace.
func TestPeerThatDoesNotAnswer(t *testing.T) {
	dead := make(chan struct{})
	defer close(dead)
	got := gather([]string{"dead", "none", "alive", "alive"}, func(peer string) []string {
		switch peer {
		case "dead":
			<-dead
		case "none":
			return nil
		}
		return []string{peer}
	})
	if strings.Join(got, " ") != "alive alive" {
		t.Errorf("got peers %q, want those that are alive", got)
	}
}
