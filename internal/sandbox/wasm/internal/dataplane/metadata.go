package dataplane

import (
	"encoding/base64"
	"fmt"
	"iter"
	"net/http"
	"net/textproto"
	"strings"

	"github.com/containerd/errdefs"
)

// reserved holds header fields that belong to HTTP, gRPC or Connect and are not metadata.
var reserved = map[string]bool{
	"Connection": true, "Content-Encoding": true, "Content-Length": true, "Content-Type": true, "Accept-Encoding": true,
	"Host": true, "Http2-Settings": true, "Keep-Alive": true, "Proxy-Connection": true, "Te": true, "Trailer": true,
	"Transfer-Encoding": true, "Upgrade": true, "Date": true, "Alt-Svc": true,
	"Connect-Protocol-Version": true, "Connect-Timeout-Ms": true, "Connect-Content-Encoding": true,
	"Connect-Accept-Encoding": true, "X-Grpc-Web": true, "X-User-Agent": true,
}

func isReserved(canonical string) bool {
	return reserved[canonical] || strings.HasPrefix(canonical, "Grpc-") || strings.HasPrefix(canonical, ":") ||
		strings.HasPrefix(canonical, http.TrailerPrefix)
}

// hasMetadata reports whether a response header has fields that are not reserved.
func hasMetadata(header http.Header) bool {
	for name := range header {
		if !isReserved(name) {
			return true
		}
	}
	return false
}

// Limits of the lists in a header's "-bin" fields. The other side writes a key once for a list, but each of the list's
// values has the key, so a header of 64 KiB could become a gigabyte.
const (
	// maxListed bounds the memory of all values in lists, in bytes, besides the values themselves.
	maxListed = 64 << 10
	// valueCost is the memory of a value besides itself and its key, in bytes.
	valueCost = 64
)

// Metadata returns a request's header as gRPC metadata. Keys are in lower case, and the values of "-bin" keys are
// decoded. HTTP allows more than gRPC: a tab in a value becomes a space, and Metadata omits the fields and values that
// SetMetadata refuses, so that a component can send on what it gets. It also omits "-bin" values that are not base64, and
// all "-bin" lists if they exceed maxListed.
func Metadata(header http.Header) iter.Seq2[string, []byte] {
	return func(yield func(string, []byte) bool) {
		lists := listed(header) <= maxListed
		for name, values := range header {
			key := strings.ToLower(name)
			if isReserved(name) || !validKey(key) {
				continue
			}
			for _, v := range values {
				if !lists && isList(key, v) {
					continue
				}
				if !yieldValues(key, v, yield) {
					return
				}
			}
		}
	}
}

// isList reports whether the value of a header field is a list. The key is in lower case.
func isList(key, v string) bool { return strings.HasSuffix(key, "-bin") && strings.Contains(v, ",") }

// listed returns the memory of all values in lists, in bytes, besides the values themselves.
func listed(header http.Header) (n int) {
	for name, values := range header {
		for _, v := range values {
			if key := strings.ToLower(name); isList(key, v) {
				n += (strings.Count(v, ",") + 1) * (len(key) + valueCost)
			}
		}
	}
	return n
}

// yieldValues yields the value of one header field. For a "-bin" field it can yield several values, because the field
// can contain a comma-separated list (PROTOCOL-HTTP2.md, "Custom-Metadata").
func yieldValues(key, v string, yield func(string, []byte) bool) bool {
	if !strings.HasSuffix(key, "-bin") {
		v = strings.Trim(strings.ReplaceAll(v, "\t", " "), " ")
		return unprintable(v) >= 0 || yield(key, []byte(v))
	}
	for part := range strings.SplitSeq(v, ",") {
		part = strings.TrimRight(strings.TrimSpace(part), "=")
		if b, err := base64.RawStdEncoding.DecodeString(part); err == nil && !yield(key, b) {
			return false
		}
	}
	return true
}

// SetMetadata adds an entry of gRPC metadata to a response's header or trailer. It encodes "-bin" values, and removes
// spaces around others, which HTTP/2 forbids (RFC 9113, 8.2.1). It returns errdefs.ErrInvalidArgument if the key or value
// is invalid, or if the key is reserved.
func SetMetadata(header http.Header, key string, value []byte) error {
	if !validKey(key) {
		return fmt.Errorf("metadata key %q: only lower-case letters, digits, '-', '_' and '.' are allowed: %w",
			key, errdefs.ErrInvalidArgument)
	}
	name := textproto.CanonicalMIMEHeaderKey(key)
	if isReserved(name) {
		return fmt.Errorf("metadata key %q is reserved for the protocol: %w", key, errdefs.ErrInvalidArgument)
	}
	if strings.HasSuffix(key, "-bin") {
		header[name] = append(header[name], base64.RawStdEncoding.EncodeToString(value))
		return nil
	}
	text := string(value)
	if i := unprintable(text); i >= 0 {
		return fmt.Errorf("metadata %q: byte 0x%02x is not printable ASCII; use a key that ends in -bin: %w",
			key, text[i], errdefs.ErrInvalidArgument)
	}
	header[name] = append(header[name], strings.Trim(text, " "))
	return nil
}

// unprintable returns the index of the first byte that the ASCII-Value of PROTOCOL-HTTP2.md does not allow, or -1.
func unprintable(value string) int {
	for i := range len(value) {
		if c := value[i]; c < ' ' || c > '~' {
			return i
		}
	}
	return -1
}

// validKey reports whether key is a valid Header-Name according to PROTOCOL-HTTP2.md.
func validKey(key string) bool {
	for i := range len(key) {
		switch c := key[i]; {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9', c == '-', c == '_', c == '.':
		default:
			return false
		}
	}
	return key != ""
}
