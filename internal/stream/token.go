package stream

import (
	"crypto/rand"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"
)

// The kinds of session; they are the first element of a URL's path.
const (
	kindExec        = "exec"
	kindAttach      = "attach"
	kindPortForward = "portforward"
)

// tokens keeps checked requests until a client comes for them. A token is used once, within ttl.
type tokens struct {
	ttl time.Duration
	max int

	mu sync.Mutex
	// pending holds the requests by token, order their tokens by age (redeemed ones are skipped when met).
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

// issue keeps a request; with max requests waiting it is an errdefs.ErrResourceExhausted.
func (t *tokens) issue(kind string, req any) (string, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	t.expire(now)
	if len(t.pending) >= t.max {
		return "", fmt.Errorf("%d streaming URLs are waiting to be used, no more are given out: use them, or wait %s: %w",
			len(t.pending), t.ttl, errdefs.ErrResourceExhausted)
	}
	token := rand.Text()
	t.pending[token] = ticket{kind: kind, req: req, expires: now.Add(t.ttl)}
	t.order = append(t.order, token)
	return token, nil
}

// redeem takes the request out; false when there is none of that kind, or no longer.
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

// expire drops what is too old. All tokens live equally long, so the oldest stand first.
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
