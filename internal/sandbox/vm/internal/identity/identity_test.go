package identity

import (
	"crypto/rand"
	"testing"
)

// TestReseed: the kernel takes a seed, and one that is too short is refused.
func TestReseed(t *testing.T) {
	seed := make([]byte, SeedSize)
	rand.Read(seed)
	if err := Reseed(seed); err != nil {
		t.Errorf("a seed: %v", err)
	}
	if err := Reseed(seed[1:]); err == nil {
		t.Error("a short seed: got no error")
	}
}
