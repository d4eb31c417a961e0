package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Delegate is one [[delegate]]: another CRI endpoint on the node.
type Delegate struct {
	Name           string   `toml:"name"`
	Endpoint       string   `toml:"endpoint"`
	ImageEndpoint  string   `toml:"image_endpoint"`
	Handlers       []string `toml:"handlers"`
	Annotations    []string `toml:"annotations"`
	ImagePrefixes  []string `toml:"image_prefixes"`
	Timeout        Duration `toml:"timeout"`
	SnapshotMaxAge Duration `toml:"snapshot_max_age"`
}

// The defaults of a [[delegate]].
const (
	delegateTimeout        = Duration(2 * time.Second)
	delegateSnapshotMaxAge = Duration(5 * time.Minute)
)

// completeDelegates sets the defaults of each [[delegate]]. Its handlers are no aliases of this node's handlers.
func (c *Config) completeDelegates() {
	for i := range c.Delegates {
		d := &c.Delegates[i]
		d.Endpoint = strings.TrimPrefix(d.Endpoint, "unix://")
		d.ImageEndpoint = cmp.Or(strings.TrimPrefix(d.ImageEndpoint, "unix://"), d.Endpoint)
		d.Timeout = cmp.Or(d.Timeout, delegateTimeout)
		d.SnapshotMaxAge = cmp.Or(d.SnapshotMaxAge, delegateSnapshotMaxAge)
		for _, h := range d.Handlers {
			delete(c.Node.HandlerAliases, h)
		}
	}
}

func (c *Config) validateDelegates(v *validator) {
	names, owners := map[string]bool{}, map[string]string{}
	for i, d := range c.Delegates {
		key := fmt.Sprintf("delegate[%d]", i)
		v.check(handlerName().MatchString(d.Name), key+".name", "%q is not a DNS label", d.Name)
		v.check(!names[d.Name], key+".name", "%q is the name of two delegates", d.Name)
		names[d.Name] = true
		v.socket(key+".endpoint", d.Endpoint)
		v.socket(key+".image_endpoint", d.ImageEndpoint)
		v.check(d.Endpoint != c.GRPC.Socket && d.ImageEndpoint != c.GRPC.Socket, key+".endpoint", "%q is the daemon's own socket", d.Endpoint)
		v.check(len(d.Handlers)+len(d.Annotations)+len(d.ImagePrefixes) > 0, key,
			"has no handlers, annotations or image_prefixes, so nothing is forwarded to it")
		for _, h := range d.Handlers {
			c.validateDelegated(v, key+".handlers", h, owners[h])
			owners[h] = d.Name
		}
		for _, a := range d.Annotations {
			name, _, _ := strings.Cut(a, "=")
			v.check(name != "", key+".annotations", "%q is neither KEY nor KEY=VALUE", a)
		}
		v.check(!slices.Contains(d.ImagePrefixes, ""), key+".image_prefixes", `"" would select all images`)
		v.positive(key+".timeout", d.Timeout)
		v.positive(key+".snapshot_max_age", d.SnapshotMaxAge)
	}
}

// validateDelegated checks a handler of a delegate; "" is the default handler.
func (c *Config) validateDelegated(v *validator, key, handler, other string) {
	switch {
	case other != "":
		v.check(false, key, "%q is already a handler of delegate %q", handler, other)
	case slices.Contains(handlers, handler):
		v.check(false, key, "%q is a handler of this node", handler)
	case handler != "":
		v.check(handlerName().MatchString(handler), key, "%q is not a DNS label, as the handler of a RuntimeClass must be", handler)
	}
}
