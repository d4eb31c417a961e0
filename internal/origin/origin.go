// Package origin checks the patterns that name web pages by their origins (RFC 6454). It depends on no other package of
// the module, because the configuration uses it.
package origin

import (
	"fmt"
	"net/url"
	"strings"

	"github.com/containerd/errdefs"
)

// Any is the pattern that matches every origin.
const Any = "*"

// Check returns errdefs.ErrInvalidArgument, with the reason, unless pattern is one of:
//
//	https://app.example.com   this origin: a scheme, a host, and a port unless it is the scheme's default
//	https://*.example.com     every subdomain of example.com, but not example.com itself
//	*                         every origin
//
// The origin null, of sandboxed frames and local files, has no pattern of its own, because it says nothing about the
// page.
func Check(pattern string) error {
	if pattern == Any {
		return nil
	}
	concrete := strings.Replace(pattern, "://*.", "://x.", 1)
	u, err := url.Parse(concrete)
	var reason string
	switch {
	case err != nil || u.Scheme == "" || u.Hostname() == "" || strings.HasSuffix(u.Hostname(), "."):
		reason = "it is neither *, nor scheme://host or scheme://host:port"
	case strings.Contains(concrete, "*"):
		reason = "* can only stand alone, or for the first labels of the host, as in https://*.example.com"
	case u.Scheme+"://"+u.Host != concrete:
		reason = "an origin has no path, query, user or fragment"
	case concrete != strings.ToLower(concrete):
		reason = "browsers send origins in lower case"
	case u.Scheme == "http" && u.Port() == "80", u.Scheme == "https" && u.Port() == "443":
		reason = "browsers leave out the default port"
	case strings.ContainsFunc(concrete, func(r rune) bool { return r > '~' }):
		reason = "browsers send international names in Punycode (xn--…)"
	default:
		return nil
	}
	return fmt.Errorf("origin %q: %s: %w", pattern, reason, errdefs.ErrInvalidArgument)
}
