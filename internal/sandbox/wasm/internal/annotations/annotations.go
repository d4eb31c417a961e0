// Package annotations parses a pod's annotations about how its components are served. It holds all keys below the prefix of
// component labels (vimana.host/ by default), which is the seed's.
package annotations

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/lazyregexp"
	"github.com/tripod-run/tripod/internal/origin"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/code"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/egress"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/redis"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// The annotations of a pod that configure how its component is served, without the prefix of component labels. A key
// with a container's name (port.greeter) is for that container only; one without is for all of the pod's components. The
// key "port" can also be a label, for compatibility with Vimana.
const (
	KeyPort           = "port"              // TCP (HTTP/2 over TLS) and UDP (HTTP/3); default 443
	KeyCleartextPort  = "cleartext-port"    // TCP without TLS; default 80, or "off"
	KeyTLS            = "tls"               // "generated" (default), "off", or a mount's container_path
	KeyClientAuth     = "client-auth"       // "require"
	KeyConcurrency    = "concurrency"       // concurrent requests
	KeyRequestTimeout = "request-timeout"   // "30s"
	KeyMaxMessage     = "max-message-bytes" // maximum size of a client message
	KeyReuse          = "reuse"             // "true" lets an instance serve more than one request
	KeyReuseRequests  = "reuse-requests"    // how many requests an instance serves
	KeyReuseAge       = "reuse-age"         // "10m"
	KeyCode           = "code"              // a code.Mode: "auto" (default), "quick" or "optimised"
	KeySnapshot       = "snapshot"          // "auto" (default), "always" or "never"; see workerapi.SnapshotMode
	KeyOrigins        = "cors-origins"      // patterns of package origin, separated by commas, or "off"
	KeyCredentials    = "cors-credentials"  // "true" allows cookies and client certificates
	KeyEgress         = "egress"            // which connections guests can open; see package egress
	KeyConfig         = "config"            // mounts whose files are values of wasi:config, or "none"
	KeyStore          = "keyvalue"          // the store of wasi:keyvalue: the URL of a Redis server, $(NAME) for the variable with it, or "node"
	KeyBlobs          = "blobstore"         // the mount in which wasi:blobstore keeps containers and objects
	KeyEgressCA       = "egress-ca"         // a PEM file in a mount, with the authorities that guests trust
)

const (
	defaultPort          = 443
	defaultCleartextPort = 80
	maxRequestTimeout    = 24 * time.Hour
	maxReuseRequests     = 1_000_000_000
	maxReuseAge          = 24 * time.Hour
	maxMaxMessage        = 1 << 30
	maxConcurrency       = 100_000
	maxOrigins           = 100
)

// Values of KeyTLS other than a mount's path.
const (
	TLSGenerated = "generated"
	TLSOff       = "off"
)

// Options are the parsed annotations.
type Options struct {
	// Port and Cleartext are port numbers, or 0 for no port.
	Port, Cleartext uint16
	// TLS is TLSGenerated, TLSOff or the container path of a mount with tls.crt, tls.key and optionally ca.crt.
	TLS           string
	RequireClient bool
	Limits        workerapi.Limits
	Code          code.Mode
	// CORS has no Origins if the annotation is missing, and empty ones if it is "off".
	CORS workerapi.CORS
	// Egress are the rules for connections that guests open, or "" for the default. EgressCA is the container path of a
	// file, or "" for the node's authorities.
	Egress, EgressCA string
	// Config are the container paths of the mounts whose files are values of wasi:config. It is nil for the default,
	// which is all mounts that a kubelet keeps up to date, and empty for none.
	Config []string
	// Store is the URL of the store for wasi:keyvalue, $(NAME), StoreOfNode or "".
	Store string
	// Blobs is the container path of the mount with the objects of wasi:blobstore, or "".
	Blobs string
}

// Parse reads the options of a pod's container with the given name. An error names the invalid annotation and its
// valid values.
func Parse(config *runtimeapi.PodSandboxConfig, container, prefix string) (Options, error) {
	r := reader{config: config, container: container, prefix: prefix}
	o := Options{TLS: r.tls()}
	o.RequireClient = r.choice(KeyClientAuth, "", "require") == "require"
	if o.TLS != TLSOff {
		o.Port = r.port(KeyPort, defaultPort)
	}
	switch {
	case r.text(KeyCleartextPort) == "off":
	case o.RequireClient && r.text(KeyCleartextPort) == "": // no default port, because clients cannot authenticate without TLS
	default:
		o.Cleartext = r.port(KeyCleartextPort, defaultCleartextPort)
	}
	o.Egress, o.EgressCA = r.egress(), r.file(KeyEgressCA)
	o.Config, o.Store = r.mounts(KeyConfig), r.store()
	o.Blobs = r.directory(KeyBlobs)
	o.Code = code.Mode(r.choice(KeyCode, string(code.ModeAuto), string(code.ModeQuick), string(code.ModeOptimised)))
	o.Limits = workerapi.Limits{
		Concurrency:     int(r.number(KeyConcurrency, 1, maxConcurrency)),
		MaxMessageBytes: r.number(KeyMaxMessage, 1, maxMaxMessage),
		RequestTimeout:  r.duration(KeyRequestTimeout, maxRequestTimeout),
		Reuse:           r.choice(KeyReuse, "false", "true") == "true",
		ReuseRequests:   int(r.number(KeyReuseRequests, 1, maxReuseRequests)),
		ReuseAge:        r.duration(KeyReuseAge, maxReuseAge),
		Snapshot:        r.snapshot(),
	}
	o.CORS = workerapi.CORS{Origins: r.origins(), Credentials: r.choice(KeyCredentials, "false", "true") == "true"}
	switch {
	case r.err != nil:
	case o.Port == 0 && o.Cleartext == 0:
		r.fail(KeyCleartextPort, "this port and TLS are both off, so clients could not reach the pod")
	case o.Port == o.Cleartext:
		r.fail(KeyCleartextPort, "%d is also the port for TLS", o.Cleartext)
	case o.RequireClient && (o.TLS == TLSOff || o.TLS == TLSGenerated):
		r.fail(KeyClientAuth, "client certificates are verified with the ca.crt of a mount; set %s to the mount's path", prefix+KeyTLS)
	case o.CORS.Credentials && (len(o.CORS.Origins) == 0 || slices.Contains(o.CORS.Origins, origin.Any)):
		r.fail(KeyCredentials, "browsers send credentials only to named origins; list them in %s, without *", prefix+KeyOrigins)
	}
	return o, r.err
}

// reader reads annotations and keeps the first error.
type reader struct {
	config            *runtimeapi.PodSandboxConfig
	container, prefix string
	err               error
}

// find returns the value of an annotation, and false if there is none.
func (r *reader) find(key string) (value string, found bool) {
	if v, ok := r.config.GetAnnotations()[r.prefix+key+"."+r.container]; ok {
		return v, true
	}
	value, found = r.config.GetAnnotations()[r.prefix+key]
	return value, found
}

func (r *reader) text(key string) string {
	if v, ok := r.find(key); ok {
		return v
	}
	if key == KeyPort {
		return r.config.GetLabels()[r.prefix+key]
	}
	return ""
}

func (r *reader) fail(key, format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("annotation %s: %s: %w", r.prefix+key, fmt.Sprintf(format, args...), errdefs.ErrInvalidArgument)
	}
}

func (r *reader) tls() string {
	switch v := r.text(KeyTLS); {
	case v == "":
		return TLSGenerated
	case v == TLSGenerated, v == TLSOff:
		return v
	case path.IsAbs(v):
		return path.Clean(v)
	default:
		r.fail(KeyTLS, "%q is not generated, off, or the absolute container path of a mount with tls.crt and tls.key", v)
		return v
	}
}

// Egress returns the rules for connections that guests open, or "" if there is no annotation.
func (r *reader) egress() string {
	v, found := r.find(KeyEgress)
	if !found {
		return ""
	}
	if _, err := egress.ParseRules(v); err != nil {
		r.fail(KeyEgress, "%v", err)
	}
	return v
}

// file returns the path of a file in a container, or "".
func (r *reader) file(key string) string { return r.path(key, "file in a mount") }

// directory returns the container path of a mount, or "".
func (r *reader) directory(key string) string { return r.path(key, "mount") }

func (r *reader) path(key, what string) string {
	v := r.text(key)
	if v == "" {
		return ""
	}
	if !path.IsAbs(v) {
		r.fail(key, "%q is not the absolute container path of a %s", v, what)
	}
	return path.Clean(v)
}

// mounts returns a list of container paths: nil if there is no such annotation, or an empty list for "none".
func (r *reader) mounts(key string) []string {
	v := r.text(key)
	if v == "" {
		return nil
	}
	list := []string{}
	if v == "none" {
		return list
	}
	for p := range strings.SplitSeq(v, ",") {
		if p = strings.TrimSpace(p); !path.IsAbs(p) {
			r.fail(key, "%q is neither none nor the absolute container path of a mount", p)
		}
		list = append(list, path.Clean(p))
	}
	return list
}

// Store returns where the store for wasi:keyvalue is, or "". A URL is not in the error, because it can have a password.
func (r *reader) store() string {
	v := r.text(KeyStore)
	if v == "" || v == StoreOfNode || variable().MatchString(v) {
		return v
	}
	if _, err := redis.ParseURL(v); err != nil {
		r.fail(KeyStore, "neither node, nor $(NAME), with the name of a variable of the container, nor a valid address: %v", err)
	}
	return v
}

// choice returns the value of the given annotation, which must be one of the allowed values. The first of them is the
// default.
func (r *reader) choice(key string, allowed ...string) string {
	v := r.text(key)
	if v == "" {
		return allowed[0]
	}
	if !slices.Contains(allowed, v) {
		r.fail(key, "%q is not %q", v, allowed[len(allowed)-1])
	}
	return v
}

func (r *reader) snapshot() workerapi.SnapshotMode {
	switch v := r.text(KeySnapshot); v {
	case "", "auto":
	case string(workerapi.SnapshotAlways), string(workerapi.SnapshotNever):
		return workerapi.SnapshotMode(v)
	default:
		r.fail(KeySnapshot, "%q is not %q, %q or %q", v, "auto", workerapi.SnapshotAlways, workerapi.SnapshotNever)
	}
	return workerapi.SnapshotAuto
}

// origins returns the list of origins, nil if there is no such annotation, or an empty list for "off".
func (r *reader) origins() []string {
	v := r.text(KeyOrigins)
	if v == "" {
		return nil
	}
	list := []string{}
	if v == "off" {
		return list
	}
	for o := range strings.SplitSeq(v, ",") {
		o = strings.TrimSpace(o)
		if err := origin.Check(o); err != nil {
			r.fail(KeyOrigins, "%v", err)
		}
		list = append(list, o)
	}
	if len(list) > maxOrigins {
		r.fail(KeyOrigins, "%d origins are more than %d", len(list), maxOrigins)
	}
	return list
}

func (r *reader) port(key string, fallback uint16) uint16 {
	v := r.text(key)
	if v == "" {
		return fallback
	}
	n, err := strconv.ParseUint(v, 10, 16)
	if err != nil || n == 0 {
		r.fail(key, "%q is not a port number", v)
	}
	return uint16(n)
}

// number returns the value of the given annotation, or 0 if there is no such annotation. The value must be in [low,
// high].
func (r *reader) number(key string, low, high int64) int64 {
	v := r.text(key)
	if v == "" {
		return 0
	}
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil || n < low || n > high {
		r.fail(key, "%q is not a number between %d and %d", v, low, high)
	}
	return n
}

func (r *reader) duration(key string, most time.Duration) time.Duration {
	v := r.text(key)
	if v == "" {
		return 0
	}
	d, err := time.ParseDuration(v)
	if err != nil || d <= 0 || d > most {
		r.fail(key, "%q is not a duration such as \"30s\", of at most %s", v, most)
	}
	return d
}

// StoreOfNode is the value of the annotation keyvalue for the node's own store.
const StoreOfNode = "node"

// variable matches a reference to an environment variable of a container, as Kubernetes writes it.
var variable = lazyregexp.New(`^\$\(([-._a-zA-Z0-9]+)\)$`)

// StoreURL returns the URL of the Redis server for wasi:keyvalue, unless the store is the node's. The annotation, which has the
// given prefix, can name a variable of the environment, so that a password can be in a Secret.
func (o Options) StoreURL(prefix string, env []string) (string, error) {
	match := variable().FindStringSubmatch(o.Store)
	if match == nil {
		return o.Store, nil
	}
	for _, e := range env {
		name, value, _ := strings.Cut(e, "=")
		if name != match[1] {
			continue
		}
		if _, err := redis.ParseURL(value); err != nil {
			return "", fmt.Errorf("annotation %s: the variable %s: %w", prefix+KeyStore, name, err)
		}
		return value, nil
	}
	return "", fmt.Errorf("annotation %s: the container has no variable %s: %w", prefix+KeyStore, match[1], errdefs.ErrInvalidArgument)
}
