//go:build failpoints

package failpoint

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

var testPoint = New("failpoint.test")

func TestArmedActions(t *testing.T) {
	t.Cleanup(func() { _ = Arm("failpoint.test", "") })
	if err := testPoint.Hit(t.Context()); err != nil {
		t.Fatalf("Hit of an unarmed point = %v, want nil", err)
	}
	if err := Arm("failpoint.test", "2*error(boom)"); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		err := testPoint.Hit(t.Context())
		if want := i < 2; (err != nil) != want {
			t.Errorf("Hit %d of 2*error(boom) = %v, want error = %v", i, err, want)
		}
	}
	if err := Arm("failpoint.test", "hang"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := testPoint.Hit(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Hit with hang = %v, want the context's error", err)
	}
}

// TestCountOfHitsAtOnce lets goroutines hit a point whose count is used up: none of them is affected.
func TestCountOfHitsAtOnce(t *testing.T) {
	t.Cleanup(func() { _ = Arm("failpoint.test", "") })
	if err := Arm("failpoint.test", "1*error(boom)"); err != nil {
		t.Fatal(err)
	}
	var failed atomic.Int64
	var hits sync.WaitGroup
	for range 4 {
		hits.Go(func() {
			for range 100_000 {
				if testPoint.Hit(t.Context()) != nil {
					failed.Add(1)
				}
			}
		})
	}
	hits.Wait()
	if n := failed.Load(); n != 1 {
		t.Errorf("got %d failed hits of 1*error(boom), want 1", n)
	}
}

func TestBadSpecs(t *testing.T) {
	for _, spec := range []string{"explode", "0*error(x)", "x*kill", "delay(soon)"} {
		if err := Arm("failpoint.test", spec); err == nil {
			t.Errorf("Arm(%q) succeeded", spec)
		}
	}
	if err := Arm("no.such.point", "kill"); err == nil {
		t.Error("Arm of an unknown point succeeded")
	}
	if _, err := parse("name-without-action"); err == nil {
		t.Error("parse of an entry without an action succeeded")
	}
}
