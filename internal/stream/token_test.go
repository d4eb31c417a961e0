package stream

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
)

// TestTokenExpiry checks that a token works until it expires, and then makes room for another.
func TestTokenExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tokens := newTokens(time.Minute, 2)
		issue := func(req string) string {
			token, err := tokens.issue(kindExec, req)
			if err != nil {
				t.Fatal(err)
			}
			return token
		}
		early := issue("early")
		time.Sleep(30 * time.Second)
		late := issue("late")
		if _, err := tokens.issue(kindExec, "full"); !errdefs.IsResourceExhausted(err) {
			t.Errorf("issue of a third token of two = %v, want resource exhausted", err)
		}
		time.Sleep(30 * time.Second)
		if req, ok := tokens.redeem(kindExec, early); ok {
			t.Errorf("redeem of an expired token = %v, true, want false", req)
		}
		if req, ok := tokens.redeem(kindExec, late); !ok || req != "late" {
			t.Errorf("redeem of a valid token = %v, %t, want late, true", req, ok)
		}
		for range 100 {
			issue("a")
			issue("b")
			time.Sleep(time.Minute)
		}
		if tokens.expire(time.Now()); len(tokens.order) != 0 || len(tokens.pending) != 0 {
			t.Errorf("%d tokens in order and %d pending after all have expired, want none", len(tokens.order), len(tokens.pending))
		}
	})
}
