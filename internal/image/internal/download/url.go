package download

import (
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/url"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/image/internal/download/translation"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
)

// RedactURL returns a URL for messages, without its password and its query, which may contain secrets.
func RedactURL(u *url.URL) string {
	return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
}

// SourceOf returns a hash that identifies a URL in records without revealing it.
func SourceOf(u *url.URL) string {
	sum := sha256.Sum256([]byte(u.String()))
	return hex.EncodeToString(sum[:16])
}

// Classify classifies an error from net/http and removes URLs with secrets from its text.
func Classify(err error) error {
	if failure.HasClass(err) {
		return err
	}
	_, unverified := errors.AsType[*tls.CertificateVerificationError](err)
	_, refused := errors.AsType[tls.AlertError](err)
	_, plain := errors.AsType[tls.RecordHeaderError](err)
	if unverified || refused || plain || errors.Is(err, http.ErrSchemeMismatch) || errors.Is(err, translation.ErrRedirect) {
		return fmt.Errorf("%w (%w)", stripURL(err), errdefs.ErrFailedPrecondition)
	}
	return stripURL(err)
}

// stripURL makes the URL in the first *url.Error of the chain safe to show.
func stripURL(err error) error {
	if failed, ok := errors.AsType[*url.Error](err); ok {
		if u, parseErr := url.Parse(failed.URL); parseErr == nil {
			failed.URL = RedactURL(u)
		} else {
			failed.URL = "a URL"
		}
	}
	return err
}
