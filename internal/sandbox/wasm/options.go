package wasm

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/origin"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/code"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/egress"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/redis"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// The annotations of a pod that configure how its component is served, without the prefix of component labels. A key
// with a container's name (port.greeter) is for that container only; one without is for all of the pod's components. The
// key "port" can also be a label, for compatibility with Vimana.
const (
	keyPort           = "port"              // TCP (HTTP/2 over TLS) and UDP (HTTP/3); default 443
	keyCleartextPort  = "cleartext-port"    // TCP without TLS; default 80, or "off"
	keyTLS            = "tls"               // "generated" (default), "off", or a mount's container_path
	keyClientAuth     = "client-auth"       // "require"
	keyConcurrency    = "concurrency"       // concurrent requests
	keyRequestTimeout = "request-timeout"   // "30s"
	keyMaxMessage     = "max-message-bytes" // maximum size of a client message
	keyReuse          = "reuse"             // "true" lets an instance serve more than one request
	keyReuseRequests  = "reuse-requests"    // how many requests an instance serves
	keyReuseAge       = "reuse-age"         // "10m"
	keyCode           = "code"              // a codeMode: "auto" (default), "quick" or "optimised"
	keySnapshot       = "snapshot"          // "auto" (default), "always" or "never"; see workerapi.SnapshotMode
	keyOrigins        = "cors-origins"      // patterns of package origin, separated by commas, or "off"
	keyCredentials    = "cors-credentials"  // "true" allows cookies and client certificates
	keyEgress         = "egress"            // which connections guests can open; see package egress
	keyConfig         = "config"            // mounts whose files are values of wasi:config, or "none"
	keyStore          = "keyvalue"          // the store of wasi:keyvalue: the URL of a Redis server, $(NAME) for the variable with it, or "node"
	keyBlobs          = "blobstore"         // the mount in which wasi:blobstore keeps containers and objects
	keyEgressCA       = "egress-ca"         // a PEM file in a mount, with the authorities that guests trust
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

// Values of keyTLS other than a mount's path.
const (
	tlsGenerated = "generated"
	tlsOff       = "off"
)

// options are the parsed annotations.
type options struct {
	// port and cleartext are port numbers, or 0 for no port.
	port, cleartext uint16
	// tls is tlsGenerated, tlsOff or the container path of a mount with tls.crt, tls.key and optionally ca.crt.
	tls           string
	requireClient bool
	limits        workerapi.Limits
	code          code.Mode
	// cors has no Origins if the annotation is missing, and empty ones if it is "off".
	cors workerapi.CORS
	// egress are the rules for connections that guests open, or "" for the default. egressCA is the container path of a
	// file, or "" for the node's authorities.
	egress, egressCA string
	// config are the container paths of the mounts whose files are values of wasi:config. It is nil for the default,
	// which is all mounts that a kubelet keeps up to date, and empty for none.
	config []string
	// store is the URL of the store for wasi:keyvalue, $(NAME), storeOfNode or "".
	store string
	// blobs is the container path of the mount with the objects of wasi:blobstore, or "".
	blobs string
}

// optionsOf reads the options of a container; c is nil for a unit pod's.
func (b *Backend) optionsOf(p *sandbox.Pod, c *sandbox.Container) (options, error) {
	name := ""
	if c != nil {
		name = c.Config.GetMetadata().GetName()
	}
	return parseOptions(p.Config, name, b.cfg.LabelPrefix)
}

// parseOptions reads the options of a pod's container with the given name. An error names the invalid annotation and its
// valid values.
func parseOptions(config *runtimeapi.PodSandboxConfig, container, prefix string) (options, error) {
	r := optionReader{config: config, container: container, prefix: prefix}
	o := options{tls: r.tls()}
	o.requireClient = r.choice(keyClientAuth, "", "require") == "require"
	if o.tls != tlsOff {
		o.port = r.port(keyPort, defaultPort)
	}
	switch {
	case r.text(keyCleartextPort) == "off":
	case o.requireClient && r.text(keyCleartextPort) == "": // no default port, because clients cannot authenticate without TLS
	default:
		o.cleartext = r.port(keyCleartextPort, defaultCleartextPort)
	}
	o.egress, o.egressCA = r.egress(), r.file(keyEgressCA)
	o.config, o.store = r.mounts(keyConfig), r.store()
	o.blobs = r.directory(keyBlobs)
	o.code = code.Mode(r.choice(keyCode, string(code.ModeAuto), string(code.ModeQuick), string(code.ModeOptimised)))
	o.limits = workerapi.Limits{
		Concurrency:     int(r.number(keyConcurrency, 1, maxConcurrency)),
		MaxMessageBytes: r.number(keyMaxMessage, 1, maxMaxMessage),
		RequestTimeout:  r.duration(keyRequestTimeout, maxRequestTimeout),
		Reuse:           r.choice(keyReuse, "false", "true") == "true",
		ReuseRequests:   int(r.number(keyReuseRequests, 1, maxReuseRequests)),
		ReuseAge:        r.duration(keyReuseAge, maxReuseAge),
		Snapshot:        r.snapshot(),
	}
	o.cors = workerapi.CORS{Origins: r.origins(), Credentials: r.choice(keyCredentials, "false", "true") == "true"}
	switch {
	case r.err != nil:
	case o.port == 0 && o.cleartext == 0:
		r.fail(keyCleartextPort, "this port and TLS are both off, so clients could not reach the pod")
	case o.port == o.cleartext:
		r.fail(keyCleartextPort, "%d is also the port for TLS", o.cleartext)
	case o.requireClient && (o.tls == tlsOff || o.tls == tlsGenerated):
		r.fail(keyClientAuth, "client certificates are verified with the ca.crt of a mount; set %s to the mount's path", prefix+keyTLS)
	case o.cors.Credentials && (len(o.cors.Origins) == 0 || slices.Contains(o.cors.Origins, origin.Any)):
		r.fail(keyCredentials, "browsers send credentials only to named origins; list them in %s, without *", prefix+keyOrigins)
	}
	return o, r.err
}

// optionReader reads annotations and keeps the first error.
type optionReader struct {
	config            *runtimeapi.PodSandboxConfig
	container, prefix string
	err               error
}

// find returns the value of an annotation, and false if there is none.
func (r *optionReader) find(key string) (value string, found bool) {
	if v, ok := r.config.GetAnnotations()[r.prefix+key+"."+r.container]; ok {
		return v, true
	}
	value, found = r.config.GetAnnotations()[r.prefix+key]
	return value, found
}

func (r *optionReader) text(key string) string {
	if v, ok := r.find(key); ok {
		return v
	}
	if key == keyPort {
		return r.config.GetLabels()[r.prefix+key]
	}
	return ""
}

func (r *optionReader) fail(key, format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("annotation %s: %s: %w", r.prefix+key, fmt.Sprintf(format, args...), errdefs.ErrInvalidArgument)
	}
}

func (r *optionReader) tls() string {
	switch v := r.text(keyTLS); {
	case v == "":
		return tlsGenerated
	case v == tlsGenerated, v == tlsOff:
		return v
	case path.IsAbs(v):
		return path.Clean(v)
	default:
		r.fail(keyTLS, "%q is not generated, off, or the absolute container path of a mount with tls.crt and tls.key", v)
		return v
	}
}

// egress returns the rules for connections that guests open, or "" if there is no annotation.
func (r *optionReader) egress() string {
	v, found := r.find(keyEgress)
	if !found {
		return ""
	}
	if _, err := egress.ParseRules(v); err != nil {
		r.fail(keyEgress, "%v", err)
	}
	return v
}

// file returns the path of a file in a container, or "".
func (r *optionReader) file(key string) string { return r.path(key, "file in a mount") }

// directory returns the container path of a mount, or "".
func (r *optionReader) directory(key string) string { return r.path(key, "mount") }

func (r *optionReader) path(key, what string) string {
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
func (r *optionReader) mounts(key string) []string {
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

// store returns where the store for wasi:keyvalue is, or "". A URL is not in the error, because it can have a password.
func (r *optionReader) store() string {
	v := r.text(keyStore)
	if v == "" || v == storeOfNode || variable().MatchString(v) {
		return v
	}
	if _, err := redis.ParseURL(v); err != nil {
		r.fail(keyStore, "neither node, nor $(NAME), with the name of a variable of the container, nor a valid address: %v", err)
	}
	return v
}

// choice returns the value of the given annotation, which must be one of the allowed values. The first of them is the
// default.
func (r *optionReader) choice(key string, allowed ...string) string {
	v := r.text(key)
	if v == "" {
		return allowed[0]
	}
	if !slices.Contains(allowed, v) {
		r.fail(key, "%q is not %q", v, allowed[len(allowed)-1])
	}
	return v
}

func (r *optionReader) snapshot() workerapi.SnapshotMode {
	switch v := r.text(keySnapshot); v {
	case "", "auto":
	case string(workerapi.SnapshotAlways), string(workerapi.SnapshotNever):
		return workerapi.SnapshotMode(v)
	default:
		r.fail(keySnapshot, "%q is not %q, %q or %q", v, "auto", workerapi.SnapshotAlways, workerapi.SnapshotNever)
	}
	return workerapi.SnapshotAuto
}

// origins returns the list of origins, nil if there is no such annotation, or an empty list for "off".
func (r *optionReader) origins() []string {
	v := r.text(keyOrigins)
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
			r.fail(keyOrigins, "%v", err)
		}
		list = append(list, o)
	}
	if len(list) > maxOrigins {
		r.fail(keyOrigins, "%d origins are more than %d", len(list), maxOrigins)
	}
	return list
}

func (r *optionReader) port(key string, fallback uint16) uint16 {
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
func (r *optionReader) number(key string, low, high int64) int64 {
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

func (r *optionReader) duration(key string, most time.Duration) time.Duration {
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
