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
	before := Total()
	err := Call(log, "a place", culprit)
	if !errdefs.IsInternal(err) || !strings.HasPrefix(err.Error(), "a place: ") || strings.Contains(err.Error(), "\n") {
		t.Errorf("got %v, want an internal error of one line that begins with the place", err)
	}
	if Counts()["a place"] != 1 || Total() != before+1 {
		t.Errorf("counted %v", Counts())
	}
	if !strings.Contains(out.String(), "guard.culprit") {
		t.Errorf("the log has no stack: %s", out)
	}
	other := errors.New("other")
	if err := Call(log, "a place", func() error { return other }); err != other || Counts()["a place"] != 1 {
		t.Errorf("without a panic: %v, %v", err, Counts())
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
		t.Errorf("it began %d times", times)
	}
}

func TestHandler(t *testing.T) {
	log, _ := logger()
	for _, value := range []any{"a defect", http.ErrAbortHandler} {
		s := httptest.NewServer(Handler(log, "a handler", http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(value) })))
		s.Config.ErrorLog = slog.NewLogLogger(log.Handler(), slog.LevelDebug)
		if resp, err := http.Get(s.URL); err == nil {
			t.Errorf("the client got %s", resp.Status)
		}
		s.Close()
	}
	if n := Counts()["a handler"]; n != 1 {
		t.Errorf("counted %d; an aborted response is no defect", n)
	}
}
