package stream

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/lazyregexp"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// ticketVersion is the version of a ticket's file. A carrier refuses tickets of other versions.
const ticketVersion = 1

// ticketFile is an unused URL: a checked request, and where its session leads. The daemon writes it, and whichever
// carrier gets the client's connection redeems it, so a URL stays valid while either of them is replaced.
type ticketFile struct {
	Version int             `json:"version"`
	Kind    string          `json:"kind"`
	Expires time.Time       `json:"expires"`
	Request json.RawMessage `json:"request"`
	Session sandbox.Session `json:"session"`
}

// ticketDir holds tickets as files that are named by their tokens. Removing its file redeems a ticket, so a ticket can
// be used only once.
type ticketDir string

var tokenPattern = lazyregexp.New(`^[A-Z2-7]{26}$`)

func (d ticketDir) path(token string) string { return filepath.Join(string(d), token) }

func (d ticketDir) write(token string, t ticketFile) error {
	raw, err := json.Marshal(t)
	if err != nil {
		return err
	}
	// The client learns the token after the file is complete.
	if err := os.WriteFile(d.path(token), raw, 0o600); err != nil {
		_ = os.Remove(d.path(token))
		return err
	}
	return nil
}

func (d ticketDir) read(token string) (t ticketFile, err error) {
	raw, err := os.ReadFile(d.path(token))
	if err == nil {
		err = json.Unmarshal(raw, &t)
	}
	return t, err
}

// redeem removes a ticket and returns its request and its session. It returns false if the token is unknown, expired,
// or of another kind.
func (d ticketDir) redeem(kind, token string) (proto.Message, sandbox.Session, bool) {
	var none sandbox.Session
	if !tokenPattern().MatchString(token) {
		return nil, none, false
	}
	t, err := d.read(token)
	if err != nil || t.Kind != kind || t.Version != ticketVersion {
		return nil, none, false
	}
	if os.Remove(d.path(token)) != nil || !time.Now().Before(t.Expires) {
		return nil, none, false
	}
	req := map[string]proto.Message{
		kindExec: &runtimeapi.ExecRequest{}, kindAttach: &runtimeapi.AttachRequest{}, kindPortForward: &runtimeapi.PortForwardRequest{},
	}[kind]
	if protojson.Unmarshal(t.Request, req) != nil {
		return nil, none, false
	}
	return req, t.Session, true
}

// valid reports whether any ticket is neither redeemed nor expired.
func (d ticketDir) valid() bool {
	entries, _ := os.ReadDir(string(d))
	for _, e := range entries {
		if t, err := d.read(e.Name()); err == nil && time.Now().Before(t.Expires) {
			return true
		}
	}
	return false
}

// issuer issues tickets. It limits the unused ones, among them those of previous daemons.
type issuer struct {
	dir ticketDir
	ttl time.Duration
	max int
	log *slog.Logger

	mu sync.Mutex
	// issued lists tickets that may be unused, the oldest first.
	issued []issuedTicket
}

type issuedTicket struct {
	token   string
	expires time.Time
}

// newIssuer finds the tickets of previous daemons and removes unreadable files.
func newIssuer(dir string, ttl time.Duration, most int, log *slog.Logger) (*issuer, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	i := &issuer{dir: ticketDir(dir), ttl: ttl, max: most, log: log}
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		expires := time.Time{}
		if t, err := i.dir.read(e.Name()); err == nil {
			expires = t.Expires
		}
		i.issued = append(i.issued, issuedTicket{e.Name(), expires})
	}
	return i, err
}

// issue writes a ticket and returns its token. It returns errdefs.ErrResourceExhausted if too many are unused.
func (i *issuer) issue(kind string, req proto.Message, session sandbox.Session) (string, error) {
	request, err := protojson.Marshal(req)
	if err != nil {
		return "", err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	now := time.Now()
	i.expire(now)
	if len(i.issued) >= i.max {
		i.forgetUsed()
	}
	if len(i.issued) >= i.max {
		return "", fmt.Errorf("too many unused streaming URLs (%d): use them, or wait %s: %w", len(i.issued), i.ttl, errdefs.ErrResourceExhausted)
	}
	token, expires := rand.Text(), now.Add(i.ttl)
	if err := i.dir.write(token,
		ticketFile{Version: ticketVersion, Kind: kind, Expires: expires, Request: request, Session: session}); err != nil {
		return "", fmt.Errorf("write a session's ticket: %w: %w", err, errdefs.ErrUnavailable)
	}
	i.issued = append(i.issued, issuedTicket{token, expires})
	return token, nil
}

// expire removes expired tickets.
func (i *issuer) expire(now time.Time) {
	kept := i.issued[:0]
	for _, t := range i.issued {
		if now.Before(t.expires) {
			kept = append(kept, t)
		} else if err := os.Remove(i.dir.path(t.token)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			i.log.Warn("cannot remove the ticket of a session", "err", err)
		}
	}
	i.issued = kept
}

// forgetUsed drops the tickets that carriers have redeemed.
func (i *issuer) forgetUsed() {
	kept := i.issued[:0]
	for _, t := range i.issued {
		if _, err := os.Lstat(i.dir.path(t.token)); err == nil {
			kept = append(kept, t)
		}
	}
	i.issued = kept
}
