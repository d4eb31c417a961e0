package kube

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// frontProxy is the API server as the client of the servers of other APIs, to which it names the user of each request.
const frontProxy = "front-proxy"

// identity holds the credentials of the programs: a certificate authority, the certificates of the servers and of the API
// server as their client, the key of service accounts, and a token and kubeconfig for each client.
type identity struct {
	dir string
	// pool contains the certificate authority.
	pool *x509.CertPool
}

// clients returns the API server's clients and their groups. A client's token is the client's name.
func clients(nodes []*Node) map[string]string {
	all := map[string]string{
		"admin":                          "system:masters",
		"system:kube-controller-manager": "",
		"system:kube-scheduler":          "",
		"system:kube-proxy":              "",
		"flannel":                        "",
		metricsServer:                    "",
	}
	for _, n := range nodes {
		all["system:node:"+n.Name] = "system:nodes"
	}
	return all
}

func (i identity) path(name string) string { return filepath.Join(i.dir, name) }

// kubeconfig returns the path of a client's kubeconfig.
func (i identity) kubeconfig(client string) string {
	return i.path(strings.ReplaceAll(client, ":", "-") + ".kubeconfig")
}

// newIdentity creates all credentials in dir.
func newIdentity(dir string, nodes []*Node) (identity, error) {
	i := identity{dir: dir, pool: x509.NewCertPool()}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return i, err
	}
	return i, errors.Join(i.writeCertificates(), i.writeClients(clients(nodes)))
}

func (i identity) writeCertificates() error {
	a, err := newAuthority()
	if err != nil {
		return err
	}
	accountKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	i.pool.AddCert(a.certificate)
	server, client := []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	return errors.Join(
		i.writePEM("ca.crt", "CERTIFICATE", a.certificate.Raw),
		i.writeKey("accounts.key", accountKey),
		i.issue(a, "apiserver", &x509.Certificate{
			SerialNumber: big.NewInt(2), ExtKeyUsage: server,
			DNSNames:    []string{NodeName, "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"},
			IPAddresses: []net.IP{net.ParseIP(NodeIP), net.ParseIP(apiServiceIP), net.IPv4(127, 0, 0, 1)},
		}),
		i.issue(a, frontProxy, &x509.Certificate{SerialNumber: big.NewInt(3), ExtKeyUsage: client}),
		i.issue(a, metricsServer, &x509.Certificate{
			SerialNumber: big.NewInt(4), ExtKeyUsage: server,
			DNSNames: []string{metricsServer + ".kube-system.svc"}, IPAddresses: []net.IP{net.ParseIP(NodeIP)},
		}),
	)
}

// authority is the certificate authority of a cluster.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

func newAuthority() (a authority, err error) {
	if a.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		return a, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "tripod-test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(1, 0, 0),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &a.key.PublicKey, a.key)
	if err != nil {
		return a, err
	}
	a.certificate, err = x509.ParseCertificate(der)
	return a, err
}

// issue writes a certificate for a name, and its key. It is valid for as long as the authority's.
func (i identity) issue(a authority, name string, template *x509.Certificate) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template.Subject, template.KeyUsage = pkix.Name{CommonName: name}, x509.KeyUsageDigitalSignature
	template.NotBefore, template.NotAfter = a.certificate.NotBefore, a.certificate.NotAfter
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, &key.PublicKey, a.key)
	if err != nil {
		return err
	}
	return errors.Join(i.writePEM(name+".crt", "CERTIFICATE", der), i.writeKey(name+".key", key))
}

func (i identity) writeKey(name string, key *ecdsa.PrivateKey) error {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	return i.writePEM(name, "EC PRIVATE KEY", der)
}

func (i identity) writePEM(name, kind string, der []byte) error {
	return os.WriteFile(i.path(name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}

// kubeconfig is the template of a kubeconfig, to fill in with the authority's file, the server's URL and the token.
const kubeconfig = `apiVersion: v1
kind: Config
clusters: [{name: tripod, cluster: {certificate-authority: %q, server: %q}}]
users: [{name: user, user: {token: %q}}]
contexts: [{name: tripod, context: {cluster: tripod, user: user}}]
current-context: tripod
`

func (i identity) writeClients(clients map[string]string) error {
	var tokens strings.Builder
	for name, group := range clients {
		fmt.Fprintf(&tokens, "%s,%s,%s,%q\n", name, name, name, group)
		text := fmt.Appendf(nil, kubeconfig, i.path("ca.crt"), serverURL, name)
		if err := os.WriteFile(i.kubeconfig(name), text, 0o600); err != nil {
			return err
		}
	}
	return os.WriteFile(i.path("tokens.csv"), []byte(tokens.String()), 0o600)
}
