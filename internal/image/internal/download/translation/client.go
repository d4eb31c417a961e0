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

// defaultRedirects limits the redirects of downloads whose rule sets no other limit. The value is net/http's.
const defaultRedirects = 10

// ErrRedirect means that a server's redirect was refused.
var ErrRedirect = errors.New("redirect refused")

type Transport struct {
	// Timeout limits the whole download; 0 means no limit while it makes progress.
	Timeout time.Duration
	// MaxRedirects limits redirects; 0 refuses them.
	MaxRedirects int
	// Proxy is used for all requests; nil means the proxy that the environment names (HTTP_PROXY, HTTPS_PROXY,
	// NO_PROXY).
	Proxy *url.URL
	// TLS is the TLS configuration from the translation file; nil means the system's default.
	TLS *tls.Config
}

func newTLS(serverName string, insecure bool) *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, ServerName: serverName, InsecureSkipVerify: insecure}
}

// addCertificate adds the certificates of a PEM text to c. If key or the text contains a private key, the certificates
// that do not belong to an authority become client certificates. All other certificates are trusted in addition to the
// system's.
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
		return invalidf("no PEM block has the type CERTIFICATE")
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

// Client returns a client for one download. The caller must close it with CloseIdleConnections.
func (t Transport) Client() *http.Client {
	base := &http.Transport{
		Proxy: http.ProxyFromEnvironment, TLSClientConfig: t.TLS, ForceAttemptHTTP2: true,
		TLSHandshakeTimeout: 30 * time.Second,
		// Store the server's file, not a compressed form of it.
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
		return fmt.Errorf("more than %d redirects, the last to %s: %w", t.MaxRedirects, to.URL.Redacted(), ErrRedirect)
	}
	if via[len(via)-1].URL.Scheme == "https" && to.URL.Scheme != "https" {
		return fmt.Errorf("from https to %s: %w", to.URL.Redacted(), ErrRedirect)
	}
	return nil
}
