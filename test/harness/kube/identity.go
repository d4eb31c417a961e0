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

// identity holds the credentials of the programs: a certificate authority, the API server's certificate, the key of
// service accounts, and a token and kubeconfig for each client.
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
	authorityKey, err1 := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	serverKey, err2 := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	accountKey, err3 := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	begin, end := time.Now().Add(-time.Hour), time.Now().AddDate(1, 0, 0)
	authority := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "tripod-test"}, NotBefore: begin, NotAfter: end,
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	server := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "kube-apiserver"}, NotBefore: begin, NotAfter: end,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:    []string{NodeName, "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"},
		IPAddresses: []net.IP{net.ParseIP(NodeIP), net.ParseIP(apiServiceIP), net.IPv4(127, 0, 0, 1)},
	}
	authorityDER, err1 := x509.CreateCertificate(rand.Reader, authority, authority, &authorityKey.PublicKey, authorityKey)
	serverDER, err2 := x509.CreateCertificate(rand.Reader, server, authority, &serverKey.PublicKey, authorityKey)
	serverKeyDER, err3 := x509.MarshalECPrivateKey(serverKey)
	accountKeyDER, err4 := x509.MarshalECPrivateKey(accountKey)
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return err
	}
	authorityPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: authorityDER})
	i.pool.AppendCertsFromPEM(authorityPEM)
	return errors.Join(
		os.WriteFile(i.path("ca.crt"), authorityPEM, 0o600),
		os.WriteFile(i.path("apiserver.crt"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: serverDER}), 0o600),
		os.WriteFile(i.path("apiserver.key"), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: serverKeyDER}), 0o600),
		os.WriteFile(i.path("accounts.key"), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: accountKeyDER}), 0o600),
	)
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
