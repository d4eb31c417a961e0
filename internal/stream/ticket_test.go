package stream

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
)

func testIssuer(t *testing.T, dir string, most int) *issuer {
	t.Helper()
	i, err := newIssuer(dir, time.Minute, most, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return i
}

func issueExec(t *testing.T, i *issuer, id string) string {
	t.Helper()
	token, err := i.issue(kindExec, &runtimeapi.ExecRequest{ContainerId: id, Cmd: []string{"true"}},
		sandbox.Session{Handler: "linux", Container: id})
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// TestTicket checks that a carrier gets the request and the session of a ticket, once, whichever daemon issued it.
func TestTicket(t *testing.T) {
	dir := t.TempDir()
	token := issueExec(t, testIssuer(t, dir, 3), "c1")
	if info, err := os.Stat(filepath.Join(dir, token)); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the ticket's file: %v, %v; want mode 0600", info, err)
	}
	next := testIssuer(t, dir, 3) // of the next daemon
	if len(next.issued) != 1 || !next.dir.valid() {
		t.Errorf("the next daemon found %d tickets, valid %v; want 1, true", len(next.issued), next.dir.valid())
	}
	if _, _, ok := next.dir.redeem(kindAttach, token); ok {
		t.Error("a ticket for exec was redeemed for attach")
	}
	req, session, ok := next.dir.redeem(kindExec, token)
	if got, _ := req.(*runtimeapi.ExecRequest); !ok || got.GetContainerId() != "c1" || session.Container != "c1" ||
		session.Handler != "linux" {
		t.Errorf("redeem = %v, %+v, %v", req, session, ok)
	}
	if _, _, ok := next.dir.redeem(kindExec, token); ok {
		t.Error("a ticket was redeemed twice")
	}
	if next.dir.valid() {
		t.Error("a redeemed ticket is valid")
	}
}

// TestTicketsAreLimited checks that used and expired tickets make room, and that unused ones do not.
func TestTicketsAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		i := testIssuer(t, t.TempDir(), 2)
		first := issueExec(t, i, "c1")
		issueExec(t, i, "c2")
		if _, err := i.issue(kindExec, &runtimeapi.ExecRequest{}, sandbox.Session{}); !errdefs.IsResourceExhausted(err) {
			t.Errorf("a third ticket: %v, want ErrResourceExhausted", err)
		}
		if _, _, ok := i.dir.redeem(kindExec, first); !ok {
			t.Fatal("the first ticket cannot be redeemed")
		}
		third := issueExec(t, i, "c3")
		time.Sleep(time.Minute) // pacing: the clock is synctest's
		if _, _, ok := i.dir.redeem(kindExec, third); ok {
			t.Error("an expired ticket was redeemed")
		}
		if i.dir.valid() {
			t.Error("expired tickets are valid")
		}
		issueExec(t, i, "c4")
		if entries, err := os.ReadDir(string(i.dir)); err != nil || len(entries) != 1 {
			t.Errorf("%d files remain of one ticket, %v", len(entries), err)
		}
	})
}

// TestForeignTickets checks that files that are no tickets of this version open nothing, and go with the next ticket if
// they cannot be read.
func TestForeignTickets(t *testing.T) {
	dir := t.TempDir()
	const damaged, newer = "AAAAAAAAAAAAAAAAAAAAAAAAAA", "BBBBBBBBBBBBBBBBBBBBBBBBBB"
	for name, content := range map[string]string{damaged: `{"version":1,"kind":"exec"`,
		newer: `{"version":2,"kind":"exec","expires":"2999-01-01T00:00:00Z","request":{}}`} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	outside := filepath.Join(filepath.Dir(dir), newer)
	i := testIssuer(t, dir, 5)
	for _, token := range []string{damaged, newer, "", "..", "../" + filepath.Base(outside), "aaaaaaaaaaaaaaaaaaaaaaaaaa"} {
		if _, _, ok := i.dir.redeem(kindExec, token); ok {
			t.Errorf("token %q was redeemed", token)
		}
	}
	issueExec(t, i, "c1")
	if _, err := os.Stat(filepath.Join(dir, damaged)); !os.IsNotExist(err) {
		t.Errorf("the damaged ticket is still there: %v", err)
	}
}

// TestForget checks that a dispatcher that learns late of a carrier's end keeps the carrier that was started since.
func TestForget(t *testing.T) {
	dead, next := process.Ended(process.ID{Pid: 1}), process.Ended(process.ID{Pid: 2})
	d := &Dispatcher{carrier: next}
	if d.forget(dead); d.carrierPID() != 2 {
		t.Error("the next carrier is forgotten")
	}
	if d.forget(next); d.carrierPID() != 0 {
		t.Error("a dead carrier is not forgotten")
	}
}
