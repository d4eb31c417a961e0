package e2e

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/bcrypt"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/registry"
)

// lockedRegistry starts docker-registry with the images of the tests, only for pulls, and with settings for authentication.
func lockedRegistry(t *testing.T, settings string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "registry") // its configuration is beside it
	if err := os.Symlink(filepath.Join(harness.Root(), "build", "images", "registry"), dir); err != nil {
		t.Fatal(err)
	}
	s, err := registry.Start(t.Context(), dir, "127.0.0.1:0", settings)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Stop() })
	return s.Addr
}

// tokenServer gives tokens for pulls, as the token servers of registries do: for a user's password by GET, and for an
// identity token by POST.
type tokenServer struct {
	*httptest.Server
	key  *ecdsa.PrivateKey
	cert []byte
}

func newTokenServer(t *testing.T) *tokenServer {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "tokens"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour),
		IsCA:     true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	s := &tokenServer{key: key, cert: cert}
	s.Server = httptest.NewServer(s)
	t.Cleanup(s.Close)
	return s
}

func (s *tokenServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_ = r.ParseForm() // a malformed form has no token
	user, password, _ := r.BasicAuth()
	if (user != "user" || password != "secret") && r.Form.Get("refresh_token") != "identity" {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	token := s.token(r.Form.Get("scope"))
	_ = json.NewEncoder(w).Encode(map[string]string{"token": token, "access_token": token})
}

// token makes a token for a scope such as "repository:NAME:pull".
func (s *tokenServer) token(scope string) string {
	part := func(v any) string {
		text, _ := json.Marshal(v) // these values can be encoded
		return base64.RawURLEncoding.EncodeToString(text)
	}
	fields := append(strings.Split(scope, ":"), "", "")
	now := time.Now()
	signed := part(map[string]any{"typ": "JWT", "alg": "ES256", "x5c": []string{base64.StdEncoding.EncodeToString(s.cert)}}) + "." +
		part(map[string]any{
			"iss": "tokens", "sub": "user", "aud": "registry", "jti": "1",
			"iat": now.Unix(), "nbf": now.Add(-time.Minute).Unix(), "exp": now.Add(time.Hour).Unix(),
			"access": []map[string]any{{"type": fields[0], "name": fields[1], "actions": []string{"pull"}}},
		})
	sum := sha256.Sum256([]byte(signed))
	r, v, err := ecdsa.Sign(rand.Reader, s.key, sum[:])
	if err != nil {
		return ""
	}
	return signed + "." + base64.RawURLEncoding.EncodeToString(append(r.FillBytes(make([]byte, 32)), v.FillBytes(make([]byte, 32))...))
}

// TestImageCredentials pulls with each form of login that a kubelet's credential provider can return, from
// docker-registry with passwords and with tokens.
func TestImageCredentials(t *testing.T) {
	dir := t.TempDir()
	hash, err := bcrypt.GenerateFromPassword([]byte("secret"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	passwords := write(t, dir, "htpasswd", append([]byte("user:"), hash...))
	basic := lockedRegistry(t, fmt.Sprintf("auth: {htpasswd: {realm: test, path: %q}}", passwords))
	tokens := newTokenServer(t)
	bundle := write(t, dir, "ca.pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: tokens.cert}))
	bearer := lockedRegistry(t,
		fmt.Sprintf("auth: {token: {realm: %q, service: registry, issuer: tokens, rootcertbundle: %q}}", tokens.URL, bundle))
	d := harness.StartDaemon(t, harness.Set("image.hosts_dirs", []string{filepath.Join(dir, "none")}))

	repository := strings.TrimPrefix(markers, harness.ImagePrefix) + "1"
	userinfo := base64.StdEncoding.EncodeToString([]byte("user:secret"))
	for name, c := range map[string]struct {
		registry string
		auth     *runtimeapi.AuthConfig
		want     codes.Code
	}{
		"basic, password": {basic, &runtimeapi.AuthConfig{Username: "user", Password: "secret"}, codes.OK},
		"basic, auth":     {basic, &runtimeapi.AuthConfig{Auth: userinfo}, codes.OK},
		"basic, server address": {basic, &runtimeapi.AuthConfig{Username: "user", Password: "secret", ServerAddress: "http://" + basic},
			codes.OK},
		"basic, another server": {basic, &runtimeapi.AuthConfig{Username: "user", Password: "secret", ServerAddress: bearer},
			codes.Unauthenticated},
		"basic, wrong password": {basic, &runtimeapi.AuthConfig{Username: "user", Password: "guess"}, codes.Unauthenticated},
		"basic, none":           {basic, nil, codes.Unauthenticated},
		"token, password":       {bearer, &runtimeapi.AuthConfig{Username: "user", Password: "secret"}, codes.OK},
		"token, auth":           {bearer, &runtimeapi.AuthConfig{Auth: userinfo}, codes.OK},
		"token, identity token": {bearer, &runtimeapi.AuthConfig{IdentityToken: "identity"}, codes.OK},
		"token, registry token": {bearer, &runtimeapi.AuthConfig{RegistryToken: tokens.token("repository:" + repository + ":pull")}, codes.OK},
		"token, foreign token":  {bearer, &runtimeapi.AuthConfig{RegistryToken: tokens.token("repository:other:pull")}, codes.Unauthenticated},
		"token, wrong identity": {bearer, &runtimeapi.AuthConfig{IdentityToken: "guess"}, codes.Unauthenticated},
		"token, none":           {bearer, nil, codes.Unauthenticated},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := d.ImageCRI().PullImage(context.Background(),
				&runtimeapi.PullImageRequest{Image: spec(c.registry + "/" + repository), Auth: c.auth})
			wantCode(t, err, c.want)
		})
	}
	if log := d.DaemonLog(); strings.Contains(log, "secret") || strings.Contains(log, userinfo) {
		t.Error("the daemon's log contains a password")
	}
}
