package wasm

import (
	"fmt"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/lazyregexp"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/redis"
)

// variable matches a reference to an environment variable of a container, as Kubernetes writes it.
var variable = lazyregexp.New(`^\$\(([-._a-zA-Z0-9]+)\)$`)

// storeInterface is the interface without which a component uses no store.
const storeInterface = "wasi:keyvalue/store"

// storeURL returns the URL of the Redis server for wasi:keyvalue. The annotation can name a variable, so that a password
// can be in a Secret.
func (b *Backend) storeURL(o options, env []string) (string, error) {
	match := variable().FindStringSubmatch(o.store)
	if match == nil {
		return o.store, nil
	}
	for _, e := range env {
		name, value, _ := strings.Cut(e, "=")
		if name != match[1] {
			continue
		}
		if _, err := redis.ParseURL(value); err != nil {
			return "", fmt.Errorf("annotation %s: the variable %s: %w", b.cfg.LabelPrefix+keyStore, name, err)
		}
		return value, nil
	}
	return "", fmt.Errorf("annotation %s: the container has no variable %s: %w", b.cfg.LabelPrefix+keyStore, match[1], errdefs.ErrInvalidArgument)
}
