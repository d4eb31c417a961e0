package translation

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// dirOf writes files and returns their directory.
func dirOf(t testing.TB, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		check(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	return dir
}

// virtlet is the example in Virtlet's documentation, and its custom resource.
const virtlet = `
prefix: my-prefix
translations:
- regexp: 'cirros/(\d\.\d\.\d)'
  url: 'https://download.cirros-cloud.net/$1/cirros-$1-x86_64-disk.img'
- name: cirros
  url: https://download.cirros-cloud.net/0.3.5/cirros-0.3.5-x86_64-disk.img
- name: cirros/0.0.0
  url: https://example.org/zero
- regexp: 'centos/(\d+)-(\d+)'
  url: 'https://cloud.centos.org/centos/$1/images/CentOS-$1-x86_64-GenericCloud-$2.qcow2'
`

const resource = `
apiVersion: "virtlet.k8s/v1"
kind: VirtletImageMapping
metadata: {name: primary, namespace: kube-system}
spec:
  translations:
  - name: small
    url: https://my.host.loc/small.qcow2?token=x
  - name: ubuntu
    url: https://first.example/ubuntu
  - name: ubuntu:22.04
    url: https://first.example/ubuntu-22.04
  transports:
    "":
      proxy: http://my-proxy.loc:8080
`

func TestFind(t *testing.T) {
	table, err := Load(dirOf(t, map[string]string{
		"20-virtlet.yaml": virtlet, "10-resource.yml": resource,
		"30-last.yaml":  "translations:\n- {name: ubuntu, url: 'http://last.example/'}\n- {regexp: '^any/', url: 'http://last.example/any', transport: slow}\ntransports: {slow: {timeout: 30000, maxRedirects: 0}}\n",
		"README.md":     "not a file of ours",
		".hidden.yaml":  "neither: this",
		"40-empty.yaml": "",
	}))
	check(t, err)
	for name, want := range map[string]string{
		"small":                         "https://my.host.loc/small.qcow2?token=x",
		"ubuntu":                        "https://first.example/ubuntu",
		"ubuntu:latest":                 "https://first.example/ubuntu",
		"ubuntu:22.04":                  "https://first.example/ubuntu-22.04",
		"ubuntu:18.04":                  "https://first.example/ubuntu",
		"my-prefix/cirros":              "https://download.cirros-cloud.net/0.3.5/cirros-0.3.5-x86_64-disk.img",
		"my-prefix/cirros/0.4.1":        "https://download.cirros-cloud.net/0.4.1/cirros-0.4.1-x86_64-disk.img",
		"my-prefix/cirros/0.0.0":        "https://example.org/zero",
		"my-prefix/centos/7-01":         "https://cloud.centos.org/centos/7/images/CentOS-7-x86_64-GenericCloud-01.qcow2",
		"any/thing":                     "http://last.example/any",
		"example.net/path/to/my.qcow2":  "https://example.net/path/to/my.qcow2",
		"example.net/path/to/my:latest": "https://example.net/path/to/my",
		"cirros":                        "",
		"my-prefix/unknown":             "",
		"example.net":                   "",
	} {
		name, tag, _ := strings.Cut(name, ":")
		e, err := table.Find(name, tag)
		if want == "" {
			if !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), name) {
				t.Errorf("Find(%s) = %+v, %v; want not found", name, e, err)
			}
			continue
		}
		check(t, err)
		if e.URL.String() != want {
			t.Errorf("Find(%s) = %s, want %s", name, e.URL, want)
		}
	}
	e, err := table.Find("small", "")
	check(t, err)
	if e.Transport.Proxy.String() != "http://my-proxy.loc:8080" || e.Transport.MaxRedirects != defaultRedirects {
		t.Errorf("transport of the rule without a name: got %+v, want the proxy and %d redirects", e.Transport, defaultRedirects)
	}
	e, err = table.Find("any/x", "")
	check(t, err)
	if e.Transport.Timeout != 30*time.Second || e.Transport.MaxRedirects != 0 || e.Transport.Proxy != nil ||
		filepath.Base(e.Source) != "30-last.yaml" {
		t.Errorf("named transport: got %+v, want 30 s without redirects and proxy, from 30-last.yaml", e)
	}
}

func TestNoFiles(t *testing.T) {
	for _, dir := range []string{"", t.TempDir(), filepath.Join(t.TempDir(), "none")} {
		table, err := Load(dir)
		check(t, err)
		if _, err := table.Find("x", ""); !errdefs.IsNotFound(err) {
			t.Errorf("Find with the directory %q: got error %v, want not found", dir, err)
		}
	}
}

func TestBadFiles(t *testing.T) {
	for text, word := range map[string]string{
		"prefix: [":       "yaml",
		"translation: []": "translation",
		"translations:\n- {name: a, url: 'https://a/', timeout: 3}":                            "timeout",
		"translations:\n- {name: a}":                                                           "url is missing",
		"translations:\n- {url: 'https://a/'}":                                                 "either name or regexp",
		"translations:\n- {name: a, regexp: b, url: 'https://a/'}":                             "either name or regexp",
		"translations:\n- {name: a, url: 'ftp://a/'}":                                          "ftp://a/",
		"translations:\n- {name: a, url: '/etc/passwd'}":                                       "/etc/passwd",
		"translations:\n- {name: a, url: 'https://me:secret@a:b/'}":                            "cannot be parsed",
		"translations:\n- {regexp: '(', url: 'https://a/'}":                                    "regexp",
		"translations:\n- {name: a, url: 'https://a/', transport: none}":                       `"none"`,
		"transports: {a: {timeout: -1}}":                                                       "timeout",
		"transports: {a: {maxRedirects: -1}}":                                                  "maxRedirects",
		"transports: {a: {proxy: 'proxy:8080'}}":                                               "proxy",
		"transports: {a: {tls: {certificates: [{cert: text}]}}}":                               "CERTIFICATE",
		"transports: {a: {tls: {certificates: [{cert: \"" + escaped("CERTIFICATE") + "\"}]}}}": "certificate 1",
		"transports: {a: {tls: {certificates: [{cert: \"" + escaped("X509 CRL") + "\"}]}}}":    "X509 CRL",
		"kind: ConfigMap\nspec: {}":                                                            "ConfigMap",
		"prefix: a\nspec: {prefix: b}":                                                         "beside",
		"prefix: a\nprefix: b":                                                                 "prefix",
		"translations: {name: a}":                                                              "yaml",
		"x: " + strings.Repeat("y", maxFile):                                                   "more than",
		"translations:\n- {name: 1, url: 'https://a/'}":                                        "yaml",
	} {
		_, err := Load(dirOf(t, map[string]string{"10-bad.yaml": text, "20-good.yaml": virtlet}))
		if err == nil || !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), word) && word != "yaml" ||
			!strings.Contains(err.Error(), "10-bad.yaml") {
			t.Errorf("Load of %.80q: got error %v, want failed precondition with %q", text, err, word)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("error %q contains the password", err)
		}
	}
	dir := dirOf(t, nil)
	check(t, os.Mkdir(filepath.Join(dir, "a.yaml"), 0o700))
	if _, err := Load(dir); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Load of a directory named like a file: got error %v, want failed precondition", err)
	}
	// The result of a regular expression is checked, too.
	table, err := Load(dirOf(t, map[string]string{"a.yaml": "translations:\n- {regexp: '(.*)', url: '$1'}"}))
	check(t, err)
	if _, err := table.Find("file", ""); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Find with an invalid URL: got error %v, want failed precondition", err)
	}
}

func escaped(kind string) string {
	return strings.ReplaceAll(string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: []byte("junk")})), "\n", "\\n")
}

// issue makes a certificate, an authority's if ca is set, signed by parent or itself.
func issue(t testing.TB, name string, ca bool, parent *tls.Certificate) (*tls.Certificate, string, string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name}, IsCA: ca,
		BasicConstraintsValid: true,
		NotBefore:             time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	signer, signerKey := template, any(key)
	if parent != nil {
		signer, signerKey = parent.Leaf, parent.PrivateKey
	}
	der, err := x509.CreateCertificate(rand.Reader, template, signer, &key.PublicKey, signerKey)
	check(t, err)
	leaf, err := x509.ParseCertificate(der)
	check(t, err)
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	check(t, err)
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf},
		string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})),
		string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}))
}

func indent(text string) string {
	return strings.ReplaceAll(strings.TrimSpace(text), "\n", "\n        ")
}

// TestTLS: a private authority, a server name other than the URL's, and a client certificate, as configured in a file.
func TestTLS(t *testing.T) {
	authority, authorityPEM, _ := issue(t, "authority", true, nil)
	server, _, _ := issue(t, "my.host.com", false, authority)
	_, clientPEM, clientKey := issue(t, "client", false, authority)
	pool := x509.NewCertPool()
	pool.AddCert(authority.Leaf)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, r.TLS.PeerCertificates[0].Subject.CommonName)
	}))
	s.TLS = &tls.Config{Certificates: []tls.Certificate{*server}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool,
		MinVersion: tls.VersionTLS12}
	s.Config.ErrorLog = nil
	s.StartTLS()
	defer s.Close()
	trust := "\n      - cert: |\n         " + strings.ReplaceAll(authorityPEM, "\n", "\n         ")
	show := "\n      - cert: |\n         " + strings.ReplaceAll(clientPEM, "\n", "\n         ") + "\n        key: |\n         " +
		strings.ReplaceAll(clientKey, "\n", "\n         ")
	for name, c := range map[string]struct {
		tls  string
		good bool
	}{
		"all":         {"serverName: my.host.com\n      certificates:" + trust + show, true},
		"insecure":    {"insecure: true\n      certificates:" + show, true},
		"other name":  {"serverName: other\n      certificates:" + trust + show, false},
		"no name":     {"certificates:" + trust + show, false},
		"no trust":    {"serverName: my.host.com\n      certificates:" + show, false},
		"no identity": {"serverName: my.host.com\n      certificates:" + trust, false},
	} {
		text := fmt.Sprintf("translations:\n- {name: a, url: %q, transport: t}\ntransports:\n  t:\n    tls:\n      %s\n", s.URL, c.tls)
		table, err := Load(dirOf(t, map[string]string{"a.yaml": text}))
		check(t, err)
		e, err := table.Find("a", "")
		check(t, err)
		client := e.Transport.Client()
		resp, err := client.Get(e.URL.String())
		if (err == nil) != c.good {
			t.Errorf("%s: got error %v, want success: %v", name, err, c.good)
		}
		if err == nil {
			resp.Body.Close()
		}
		client.CloseIdleConnections()
	}
	// Load detects the key of another certificate.
	_, _, otherKey := issue(t, "other", false, nil)
	text := fmt.Sprintf("transports:\n  t:\n    tls:\n      certificates:\n      - cert: |\n        %s\n        key: |\n        %s\n",
		indent(" "+clientPEM), indent(" "+otherKey))
	if _, err := Load(dirOf(t, map[string]string{"a.yaml": text})); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Load with the key of another certificate: got error %v, want failed precondition", err)
	}
}

func TestRedirectsAndProxy(t *testing.T) {
	hops := 0
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/end" {
			fmt.Fprint(w, "end")
			return
		}
		if hops++; hops%2 == 0 {
			http.Redirect(w, r, "/end", http.StatusFound)
			return
		}
		http.Redirect(w, r, "/next", http.StatusFound)
	}))
	defer s.Close()
	for limit, good := range map[int]bool{0: false, 1: false, 2: true, 9: true} {
		hops = 0
		resp, err := Transport{MaxRedirects: limit}.Client().Get(s.URL)
		if (err == nil) != good || err != nil && !errors.Is(err, ErrRedirect) {
			t.Errorf("limit of %d redirects: got error %v, want success: %v", limit, err, good)
		}
		if err == nil {
			resp.Body.Close()
		}
	}
	down := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter,
		r *http.Request) {
		http.Redirect(w, r, s.URL+"/end", http.StatusFound)
	}))
	defer down.Close()
	if _, err := (Transport{MaxRedirects: 3, TLS: newTLS("", true)}).Client().Get(down.URL); !errors.Is(err, ErrRedirect) {
		t.Errorf("redirect from https to http: got error %v, want ErrRedirect", err)
	}
	asked := ""
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { asked = r.URL.String() }))
	defer proxy.Close()
	table, err := Load(dirOf(t,
		map[string]string{"a.yaml": "translations: [{name: a, url: 'http://nowhere.invalid/x'}]\ntransports: {'': {proxy: '" + proxy.URL +
			"'}}"}))
	check(t, err)
	e, err := table.Find("a", "")
	check(t, err)
	resp, err := e.Transport.Client().Get(e.URL.String())
	check(t, err)
	resp.Body.Close()
	if asked != "http://nowhere.invalid/x" {
		t.Errorf("proxy: got a request for %q, want http://nowhere.invalid/x", asked)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(virtlet), "my-prefix/cirros/0.1.2")
	f.Add([]byte(resource), "small")
	f.Fuzz(func(t *testing.T, text []byte, name string) {
		parsed, err := parse(text)
		if err != nil {
			if !errdefs.IsFailedPrecondition(err) {
				t.Fatalf("parse returned an error of the wrong class: %v", err)
			}
			return
		}
		table := &Table{files: []file{*parsed}}
		if e, err := table.Find(name, ""); err == nil && (e.URL.Host == "" || e.URL.Scheme != "http" && e.URL.Scheme != "https") {
			t.Fatalf("Find(%q) = %q, want an http or https URL", name, e.URL)
		}
	})
}
