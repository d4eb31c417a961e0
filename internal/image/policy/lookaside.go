package policy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	"sigs.k8s.io/yaml"
)

const (
	// defaultLookaside is the store that containers/image uses as root without an entry in registries.d.
	defaultLookaside = "file:///var/lib/containers/sigstore"
	// maxSignatures and maxBytes limit the signatures of one image.
	maxSignatures = 64
	maxBytes      = 1 << 20
)

// lookaside is an entry of containers-registries.d(5).
type lookaside struct {
	Lookaside string `json:"lookaside"`
	// Sigstore is the previous name of Lookaside.
	Sigstore string `json:"sigstore"`
}

func (l lookaside) url() string {
	if l.Lookaside != "" {
		return l.Lookaside
	}
	return l.Sigstore
}

// Lookaside returns the OpenPGP signatures of an image from the store that the files in registriesDir name for it. Its
// error is errdefs.ErrUnavailable if the store cannot be read, errdefs.ErrFailedPrecondition if the files are invalid, and
// errdefs.ErrInvalidArgument if the store has too much.
func Lookaside(ctx context.Context, client *http.Client, registriesDir string, named reference.Named,
	subjects []digest.Digest) ([][]byte, error) {
	base, err := lookasideOf(registriesDir, named)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	var all [][]byte
	room := int64(maxBytes)
	for _, subject := range subjects {
		for n := 1; ; n++ {
			u := base.JoinPath(fmt.Sprintf("%s@%s=%s", reference.Path(named), subject.Algorithm(), subject.Encoded()),
				fmt.Sprintf("signature-%d", n))
			signature, err := read(ctx, client, u, room)
			if errors.Is(err, fs.ErrNotExist) {
				break
			}
			if err != nil {
				return nil, fmt.Errorf("signature %s: %w: %w", u.Redacted(), err, errdefs.ErrUnavailable)
			}
			all, room = append(all, signature), room-int64(len(signature))
			if len(all) > maxSignatures || room < 0 {
				return nil, fmt.Errorf("%s has more than %d signatures, or more than %d bytes of them: %w", base.Redacted(), maxSignatures, maxBytes,
					errdefs.ErrInvalidArgument)
			}
		}
	}
	return all, nil
}

// lookasideOf returns the address of the store for an image. The most specific scope with an address applies.
func lookasideOf(dir string, named reference.Named) (*url.URL, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return nil, err
	}
	address := map[string]string{"": defaultLookaside}
	for _, name := range files {
		var file struct {
			Default *lookaside           `json:"default-docker"`
			Docker  map[string]lookaside `json:"docker"`
		}
		document, err := os.ReadFile(name)
		if err == nil {
			err = yaml.Unmarshal(document, &file)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		if file.Default != nil && file.Default.url() != "" {
			address[""] = file.Default.url()
		}
		for scope, l := range file.Docker {
			if l.url() != "" {
				address[scope] = l.url()
			}
		}
	}
	for _, scope := range append(scopesOf(named), "") {
		if at := address[scope]; at != "" {
			return parseLookaside(at)
		}
	}
	return nil, errdefs.ErrNotFound // unreachable: the empty scope has an address
}

func parseLookaside(address string) (*url.URL, error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, fmt.Errorf("lookaside %q: %w", address, err)
	}
	switch u.Scheme {
	case "file", "http", "https":
		return u, nil
	}
	return nil, fmt.Errorf("lookaside %q: the scheme must be file, http or https", address)
}

// read reads one signature, of which it returns at most one byte more than limit. The error for a missing one is
// fs.ErrNotExist.
func read(ctx context.Context, client *http.Client, u *url.URL, limit int64) ([]byte, error) {
	if u.Scheme == "file" {
		file, err := os.Open(path.Clean(u.Path))
		if err != nil {
			return nil, err
		}
		defer file.Close()
		return io.ReadAll(io.LimitReader(file, limit+1))
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
		return io.ReadAll(io.LimitReader(resp.Body, limit+1))
	case http.StatusNotFound:
		return nil, fs.ErrNotExist
	}
	return nil, errors.New(strings.TrimSpace(resp.Status))
}
