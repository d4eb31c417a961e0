package guard

import (
	"bytes"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

func logger() (*slog.Logger, *bytes.Buffer) {
	var out bytes.Buffer
	return slog.New(slog.NewTextHandler(&out, nil)), &out
}

func culprit() error { panic("one\ntwo") }

func TestCall(t *testing.T) {
	log, out := logger()
	counts, total := Counts(), Total() // of earlier tests of this process
	err := Call(log, "a place", culprit)
	if !errdefs.IsInternal(err) || !strings.HasPrefix(err.Error(), "a place: ") || strings.Contains(err.Error(), "\n") {
		t.Errorf("Call = %v, want an internal error of one line that begins with the place", err)
	}
	want := counts["a place"] + 1
	if Counts()["a place"] != want || Total() != total+1 {
		t.Errorf("Counts = %v and Total = %d, want %d for the place and a total of %d", Counts(), Total(), want, total+1)
	}
	if !strings.Contains(out.String(), "guard.culprit") {
		t.Errorf("the log does not contain the stack: %s", out)
	}
	other := errors.New("other")
	if err := Call(log, "a place", func() error { return other }); err != other || Counts()["a place"] != want {
		t.Errorf("Call without a panic = %v, Counts = %v, want f's error and no new count", err, Counts())
	}
}

func TestLoopBeginsAgain(t *testing.T) {
	log, _ := logger()
	times := 0
	Loop(log, "a loop", func() {
		if times++; times == 1 {
			panic("once")
		}
	})()
	if times != 2 {
		t.Errorf("Loop called f %d times, want 2", times)
	}
}

func TestHandler(t *testing.T) {
	log, _ := logger()
	before := Counts()["a handler"]
	for _, value := range []any{"a defect", http.ErrAbortHandler} {
		s := httptest.NewServer(Handler(log, "a handler", http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(value) })))
		s.Config.ErrorLog = slog.NewLogLogger(log.Handler(), slog.LevelDebug)
		if resp, err := http.Get(s.URL); err == nil {
			t.Errorf("the client got status %s, want an aborted response", resp.Status)
		}
		s.Close()
	}
	if n := Counts()["a handler"] - before; n != 1 {
		t.Errorf("counted %d panics, want 1: http.ErrAbortHandler does not count", n)
	}
}

// TestPart: a panic of a part goes on where the request waits, with the stack of the part, after all parts have ended.
func TestPart(t *testing.T) {
	log, out := logger()
	ended := false
	err := Call(log, "request", func() error {
		var parts Group
		release := make(chan struct{})
		parts.Go(func() error { defer close(release); panicInAPart(); return nil })
		parts.Go(func() error { <-release; ended = true; return errors.New("failed") })
		return parts.Wait()
	})
	if !errdefs.IsInternal(err) || !strings.Contains(err.Error(), "in a part") {
		t.Errorf("got error %v, want the panic", err)
	}
	if !ended || !strings.Contains(out.String(), "panicInAPart") {
		t.Errorf("got second part ended %v and log %s, want true and the stack of the first part", ended, out)
	}

	var parts Group
	parts.Go(func() error { return nil })
	parts.Go(func() error { return errors.New("failed") })
	if err := parts.Wait(); err == nil || err.Error() != "failed" {
		t.Errorf("got error %v, want that of the second part", err)
	}
}

func panicInAPart() { panic("in a part") }
