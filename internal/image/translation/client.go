package translation

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// defaultRedirects is how often a server may send us on where no transport says it; net/http has the same.
const defaultRedirects = 10

// ErrRedirect says that a server sent us where we do not go.
var ErrRedirect = errors.New("redirect refused")

// Transport is how a URL is reached.
type Transport struct {
	// Timeout is how long a whole download may take; 0: as long as it moves.
	Timeout time.Duration
	// MaxRedirects is how often a server may send us on; 0 is never.
	MaxRedirects int
	// Proxy is used for all; nil is what the environment says (HTTP_PROXY, HTTPS_PROXY, NO_PROXY).
	Proxy *url.URL
	// TLS is what a file asks for; nil is the system's.
	TLS *tls.Config
}

func newTLS(serverName string, insecure bool) *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, ServerName: serverName, InsecureSkipVerify: insecure}
}

// addCertificate takes the certificates of a PEM text: one with a key (in key, or in the text itself) that is not an
// authority's is shown to servers that ask for one; all others are trusted, besides the system's.
func addCertificate(c *tls.Config, text, key string) error {
	var certificates []*pem.Block
	var private *pem.Block
	for rest := []byte(key + "\n" + text); ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		switch {
		case block.Type == "CERTIFICATE":
			certificates = append(certificates, block)
		case strings.HasSuffix(block.Type, "PRIVATE KEY") && private == nil:
			private = block
		default:
			return invalidf("a PEM block of the type %q", block.Type)
		}
	}
	if len(certificates) == 0 {
		return invalidf("there is no PEM block of the type CERTIFICATE")
	}
	for _, block := range certificates {
		parsed, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return invalidf("%v", err)
		}
		if private != nil && !parsed.IsCA {
			pair, err := tls.X509KeyPair(pem.EncodeToMemory(block), pem.EncodeToMemory(private))
			if err != nil {
				return invalidf("%v", err)
			}
			c.Certificates = append(c.Certificates, pair)
			continue
		}
		if c.RootCAs == nil {
			if c.RootCAs, err = x509.SystemCertPool(); err != nil {
				return fmt.Errorf("the system's certificates: %w", err)
			}
		}
		c.RootCAs.AddCert(parsed)
	}
	return nil
}

// Client makes the client of one download. Its idle connections are closed by CloseIdleConnections.
func (t Transport) Client() *http.Client {
	base := &http.Transport{
		Proxy: http.ProxyFromEnvironment, TLSClientConfig: t.TLS, ForceAttemptHTTP2: true,
		TLSHandshakeTimeout: 30 * time.Second,
		// What is stored is what the server has, not what it was packed in for the way.
		DisableCompression: true,
	}
	if t.TLS != nil {
		base.TLSClientConfig = t.TLS.Clone()
	}
	if t.Proxy != nil {
		base.Proxy = http.ProxyURL(t.Proxy)
	}
	return &http.Client{Transport: base, CheckRedirect: t.checkRedirect}
}

func (t Transport) checkRedirect(to *http.Request, via []*http.Request) error {
	if len(via) > t.MaxRedirects {
		return fmt.Errorf("more than %d redirects, to %s at last: %w", t.MaxRedirects, to.URL.Redacted(), ErrRedirect)
	}
	if via[len(via)-1].URL.Scheme == "https" && to.URL.Scheme != "https" {
		return fmt.Errorf("from https to %s: %w", to.URL.Redacted(), ErrRedirect)
	}
	return nil
}
