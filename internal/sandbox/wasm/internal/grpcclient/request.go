package grpcclient

import (
	"cmp"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"
	"google.golang.org/grpc/codes"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
)

// userAgent is sent unless the guest sends its own.
const userAgent = "grpc-tripod"

// Entry is one metadata value.
type Entry struct {
	Key   string
	Value []byte
}

// Request is the beginning of a call.
type Request struct {
	// Target is http://HOST:PORT for HTTP/2 without TLS, or https://HOST:PORT.
	Target string
	// Authority is the pseudo-header :authority; HOST:PORT of the target if it is empty.
	Authority string
	// Method is such as "/greet.v1.Greeter/SayHello".
	Method string
	// Timeout is the time until the deadline; negative if there is none.
	Timeout time.Duration
	// Metadata has lower-case keys. The values of keys that end in -bin are not encoded.
	Metadata []Entry
	// MaxReceive is the size of the largest response message, in bytes.
	MaxReceive uint32
}

// size returns the host memory of what the guest has set, in bytes.
func (r *Request) size() int {
	n := len(r.Target) + len(r.Authority) + len(r.Method)
	for _, e := range r.Metadata {
		n += len(e.Key) + len(e.Value) + entryCost
	}
	return n
}

// build makes the http.Request, without a body.
func (r *Request) build() (*http.Request, *dataplane.Status) {
	invalid := func(format string, args ...any) (*http.Request, *dataplane.Status) {
		return nil, dataplane.Errorf(codes.InvalidArgument, format, args...)
	}
	target, err := url.Parse(r.Target)
	if err != nil || target.Scheme != "http" && target.Scheme != "https" || target.Host == "" || target.User != nil ||
		target.Path != "" || target.RawQuery != "" || target.Fragment != "" {
		return invalid("the target %.100q is not http://HOST:PORT or https://HOST:PORT", r.Target)
	}
	if service, method, ok := strings.Cut(strings.TrimPrefix(r.Method, "/"), "/"); !ok || service == "" || method == "" || r.Method[0] != '/' {
		return invalid("the method %.100q is not /SERVICE/METHOD", r.Method)
	}
	if !httpguts.ValidHostHeader(r.Authority) {
		return invalid("the authority %.100q is invalid", r.Authority)
	}
	target.Path = r.Method
	header := http.Header{}
	for _, e := range r.Metadata {
		if err := dataplane.SetMetadata(header, e.Key, e.Value); err != nil {
			return invalid("%v", err)
		}
	}
	header["Content-Type"] = []string{contentType}
	header["Te"] = []string{"trailers"}
	header["Grpc-Accept-Encoding"] = []string{"identity"}
	if header["User-Agent"] == nil {
		header["User-Agent"] = []string{userAgent}
	}
	if r.Timeout >= 0 {
		header["Grpc-Timeout"] = []string{formatTimeout(r.Timeout)}
	}
	return &http.Request{
		Method: http.MethodPost, URL: target, Host: cmp.Or(r.Authority, target.Host), Header: header, ContentLength: -1,
		Proto: "HTTP/2.0", ProtoMajor: 2,
	}, nil
}

// timeoutUnits are the units of grpc-timeout, in ascending order.
var timeoutUnits = []struct {
	letter string
	size   time.Duration
}{{"n", time.Nanosecond}, {"u", time.Microsecond}, {"m", time.Millisecond}, {"S", time.Second}, {"M", time.Minute}, {"H", time.Hour}}

// formatTimeout formats a timeout with at most eight digits, rounded up.
func formatTimeout(d time.Duration) string {
	for _, unit := range timeoutUnits {
		if n := d / unit.size; n < 100_000_000-1 {
			if d%unit.size > 0 {
				n++
			}
			return strconv.FormatInt(int64(n), 10) + unit.letter
		}
	}
	return strconv.FormatInt(math.MaxInt64/int64(time.Hour), 10) + "H" // unreachable: a Duration has fewer hours
}
