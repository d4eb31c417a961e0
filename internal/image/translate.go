package image

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"

	"github.com/tripod-run/tripod/internal/image/internal/download"
	"github.com/tripod-run/tripod/internal/image/internal/download/translation"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
)

// Translation configures the translated names: image names that refer to disks downloaded by HTTP(S).
type Translation struct {
	// Prefix begins translated names ("virtlet.cloud/"); empty disables them.
	Prefix string
	// Dir contains the translation files, which every pull reads.
	Dir string
}

// normalPrefix converts a prefix to the form of full references.
func normalPrefix(prefix string) (string, error) {
	if prefix == "" {
		return "", nil
	}
	named, err := reference.ParseNormalizedNamed(strings.TrimSuffix(prefix, "/") + "/x")
	if err != nil {
		return "", failure.Invalidf("image store: the prefix of translated names, %q: %v", prefix, err)
	}
	return strings.TrimSuffix(named.Name(), "x"), nil
}

// translated returns a translated name without its prefix.
func (s *Store) translated(named reference.Named) (name string, ok bool) {
	if s.translate.Prefix == "" {
		return "", false
	}
	return strings.CutPrefix(named.Name(), s.translate.Prefix)
}

// Translated reports whether a reference is a translated name. It reads no image or file.
func (s *Store) Translated(ref string) bool {
	named, err := reference.ParseDockerRef(ref)
	if err != nil {
		return false
	}
	_, ok := s.translated(named)
	return ok
}

func (s *Store) pullTranslated(ctx context.Context, named reference.Named, name string, t *tracker) (img Image, err error) {
	what := fmt.Sprintf("pull image %q", named)
	defer func() {
		if err != nil {
			err = failure.Classify(ctx, what, download.Classify(err))
		}
	}()
	if err := s.admitUnsigned(named); err != nil {
		return Image{}, err
	}
	want := digest.Digest("")
	if digested, ok := named.(reference.Digested); ok {
		if want = digested.Digest(); want.Algorithm() != digest.SHA256 {
			return Image{}, failure.Invalidf("the digest of a disk must be sha256, not %s", want.Algorithm())
		}
	}
	tag := ""
	if tagged, ok := named.(reference.Tagged); ok {
		tag = tagged.Tag()
	}
	table, err := translation.Load(s.translate.Dir)
	if err != nil {
		return Image{}, err
	}
	endpoint, err := table.Find(name, tag)
	if err != nil {
		return Image{}, err
	}
	what += " from " + download.RedactURL(endpoint.URL)
	limit := s.cfg.PullTimeout
	if t := endpoint.Transport.Timeout; t > 0 {
		limit = min(limit, t)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not complete after %v: %w", limit, errdefs.ErrUnavailable))
	defer cancel()
	ctx, stop := t.watch(ctx, s.cfg.ProgressTimeout)
	defer stop()
	d := &downloaded{Store: s, named: named, endpoint: endpoint, want: want, tracker: t, source: download.SourceOf(endpoint.URL)}
	start := time.Now()
	img, fetched, err := d.run(ctx)
	if err == nil && fetched {
		t.finish()
		s.cfg.Logger.InfoContext(ctx, "image downloaded", "image", named.String(), "from", download.RedactURL(endpoint.URL), "id", img.ID,
			"bytes", img.Size, "took", time.Since(start))
	}
	return img, err
}
