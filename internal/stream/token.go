package stream

import (
	"crypto/rand"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// The kinds of session. The kind is the first element of a URL's path.
const (
	kindExec        = string(sandbox.SessionExec)
	kindAttach      = string(sandbox.SessionAttach)
	kindPortForward = string(sandbox.SessionPortForward)
)

// tokens holds checked requests until a client redeems their tokens. A token can be used only once, and only within its
// lifetime (ttl).
type tokens struct {
	ttl time.Duration
	max int

	mu sync.Mutex
	// pending holds the requests by token. order lists the tokens, the oldest first; it may also contain redeemed
	// tokens.
	pending map[string]ticket
	order   []string
}

type ticket struct {
	kind    string
	req     any
	expires time.Time
}

func newTokens(ttl time.Duration, max int) *tokens {
	return &tokens{ttl: ttl, max: max, pending: map[string]ticket{}}
}

// issue stores a request and returns its token. If too many requests are pending, it returns
// errdefs.ErrResourceExhausted.
func (t *tokens) issue(kind string, req any) (string, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	t.expire(now)
	if len(t.pending) >= t.max {
		return "", fmt.Errorf("too many unused streaming URLs (%d): use them, or wait %s: %w",
			len(t.pending), t.ttl, errdefs.ErrResourceExhausted)
	}
	token := rand.Text()
	t.pending[token] = ticket{kind: kind, req: req, expires: now.Add(t.ttl)}
	t.order = append(t.order, token)
	return token, nil
}

// redeem removes and returns the request of a token. It returns false if the token is unknown, expired, or of another
// kind.
func (t *tokens) redeem(kind, token string) (any, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	found, ok := t.pending[token]
	if !ok || found.kind != kind {
		return nil, false
	}
	delete(t.pending, token)
	return found.req, time.Now().Before(found.expires)
}

// expire drops expired tokens. All tokens have the same lifetime, so the oldest token expires first.
func (t *tokens) expire(now time.Time) {
	done := 0
	for _, token := range t.order {
		if found, ok := t.pending[token]; ok {
			if now.Before(found.expires) {
				break
			}
			delete(t.pending, token)
		}
		done++
	}
	t.order = t.order[done:]
}
