package guestapi

import (
	"strings"
	"testing"
)

// TestLines: lines arrive whole, whatever the pieces in which they were sent. A guest that never ends a line is stopped.
func TestLines(t *testing.T) {
	var got []string
	l := &Lines{Limit: 10, Line: func(b []byte) error { got = append(got, string(b)); return nil }}
	for _, piece := range []string{"one\ntw", "o", "\n\nthree\n", "0123456789"} {
		if n, err := l.Write([]byte(piece)); n != len(piece) || err != nil {
			t.Fatalf("Write(%q) = %d, %v", piece, n, err)
		}
	}
	if want := []string{"one\n", "two\n", "\n", "three\n"}; strings.Join(got, "|") != strings.Join(want, "|") {
		t.Errorf("lines: got %q, want %q", got, want)
	}
	if _, err := l.Write([]byte("x")); err == nil {
		t.Error("a line longer than the limit was accepted")
	}
}
