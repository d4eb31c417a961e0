package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/image/translation"
)

var failDownload = failpoint.New("image.download.commit")

// maxValidator limits the bytes of a remembered ETag.
const maxValidator = 512

// download is the download of a disk for one translated name.
//
//	known? ── If-None-Match ──▶ 304  the image is unchanged
//	part?  ── Range, If-Range ─▶ 206  resume the part       200  start over
//
// A part is an ingest of the content store. The part's name contains a hash of the URL. It also contains the expected
// digest or the server's validator, so that it identifies the version of the file. A part is therefore never continued
// with another file. Without a digest for a final check, a part from before a reboot is not resumed: it may have lost
// data in a power failure (fault V4).
type download struct {
	*Store
	named    reference.Named
	endpoint *translation.Endpoint
	want     digest.Digest // expected digest of the file; "" if the name has none
	tracker  *tracker
	source   string // see sourceOf

	client *http.Client
	at     int64 // bytes already stored
}

// validators are the server's ETag and modification date of a file.
type validators struct{ etag, modified string }

// fetched is a completely downloaded file.
type fetched struct {
	ocispec.Descriptor
	validators
	// contentType is the server's media type.
	contentType string
}

// run makes the image available, and reports whether anything was downloaded.
func (d *download) run(ctx context.Context) (img Image, downloaded bool, err error) {
	key := "download://" + d.source
	if err := d.locks.Lock(ctx, key); err != nil {
		return Image{}, false, err
	}
	defer d.locks.Unlock(key)
	known, cached, err := d.known(ctx)
	if err != nil {
		return Image{}, false, err
	}
	if known != nil && d.want != "" {
		// The stored file has the expected digest, so there is no need to ask the server.
		img, err := d.recordExisting(ctx, known, cached)
		return img, false, err
	}
	ctx, release, err := d.lease(ctx, []string{d.named.String()})
	if err != nil {
		return Image{}, false, err
	}
	defer func() {
		release(err != nil && (ctx.Err() != nil || errdefs.IsUnavailable(err) || errdefs.IsUnavailable(failure.ClassOf(err))))
	}()
	d.client = d.endpoint.Transport.Client()
	defer d.client.CloseIdleConnections()
	got, err := d.fetch(ctx, cached)
	if err != nil {
		return Image{}, false, err
	}
	if got == nil {
		img, err := d.recordExisting(ctx, known, cached)
		return img, false, err
	}
	details, err := d.assemble(ctx, got)
	if err != nil {
		return Image{}, false, err
	}
	if img, err = d.recordAs(ctx, details, got.validators); err != nil {
		return Image{}, false, err
	}
	// The digest is known now, so also release the leases that earlier downloads took under name@digest.
	if _, settle, err := d.lease(ctx, d.names(details)); err == nil {
		settle(false)
	}
	return img, true, nil
}

// fetch downloads the file and resumes broken transfers. It returns nil if the server still has the cached version.
func (d *download) fetch(ctx context.Context, cached validators) (*fetched, error) {
	defer d.tracker.Busy()()
	for idle := 0; ; idle++ {
		before := d.at
		got, err := d.attempt(ctx, cached)
		if err == nil {
			return got, nil
		}
		if d.at > before {
			idle = 0
		}
		err = downloadError(err)
		if ctx.Err() != nil || errdefs.IsFailedPrecondition(err) || !failure.Transient(err) || idle == maxIdleRetries {
			return nil, err
		}
		select {
		case <-time.After(retryPace):
		case <-ctx.Done():
		}
	}
}

// attempt makes one request.
func (d *download) attempt(ctx context.Context, cached validators) (*fetched, error) {
	have, err := d.part(ctx)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, d.endpoint.URL.String(), nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("User-Agent", "tripod")
	cached.addTo(req)
	have.addTo(req)
	resp, err := d.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	d.tracker.Touch()
	switch resp.StatusCode {
	case http.StatusNotModified:
		if cached == (validators{}) {
			return nil, fmt.Errorf("the server answers \"not modified\" to a plain request: %w", errdefs.ErrFailedPrecondition)
		}
		return nil, nil
	case http.StatusOK:
		return d.saveBody(ctx, resp, have, 0, resp.ContentLength)
	case http.StatusPartialContent:
		from, total, ok := contentRange(resp.Header.Get("Content-Range"))
		if !ok || from != have.offset {
			return nil, errors.Join(fmt.Errorf("asked for the bytes after %d, the server sent %q: %w", have.offset,
				resp.Header.Get("Content-Range"), errdefs.ErrFailedPrecondition), d.drop(ctx, have.ref))
		}
		return d.saveBody(ctx, resp, have, from, total)
	case http.StatusRequestedRangeNotSatisfiable:
		// The server has no bytes after ours: either the part is complete, or it belongs to another file.
		if rest, ok := strings.CutPrefix(resp.Header.Get("Content-Range"), "bytes */"); ok && rest == strconv.FormatInt(have.offset, 10) {
			return d.saveBody(ctx, &http.Response{Body: http.NoBody, Header: resp.Header}, have, have.offset, have.offset)
		}
		if have.offset > 0 {
			return nil, errors.Join(fmt.Errorf("the file has changed: %w", io.ErrUnexpectedEOF), d.drop(ctx, have.ref))
		}
	}
	return nil, remoteerrors.ErrUnexpectedStatus{
		Status: resp.Status, StatusCode: resp.StatusCode, RequestMethod: http.MethodGet, RequestURL: redactURL(d.endpoint.URL),
	}
}

// addTo adds a condition to the request: the server sends the file only if the file's current validators differ from v.
func (v validators) addTo(req *http.Request) {
	if v.etag != "" {
		req.Header.Set("If-None-Match", v.etag)
	} else if v.modified != "" {
		req.Header.Set("If-Modified-Since", v.modified)
	}
}

func validatorsOf(h http.Header) validators {
	v := validators{h.Get("ETag"), h.Get("Last-Modified")}
	if len(v.etag) > maxValidator {
		v.etag = ""
	}
	if _, err := http.ParseTime(v.modified); err != nil {
		v.modified = ""
	}
	return v
}

// rangeValidator returns the validator for If-Range: a strong ETag or, if the server sent no ETag, a modification date
// at least a minute before the response's date (RFC 9110, 8.8.2.2); otherwise "".
func (v validators) rangeValidator(h http.Header) string {
	if v.etag != "" {
		if strings.HasPrefix(v.etag, "W/") {
			return ""
		}
		return v.etag
	}
	modified, err := http.ParseTime(v.modified)
	now, dateErr := http.ParseTime(h.Get("Date"))
	if err != nil || dateErr != nil || now.Sub(modified) < time.Minute {
		return ""
	}
	return v.modified
}

// contentRange parses "bytes FROM-TO/TOTAL"; total is -1 if the server does not know it.
func contentRange(text string) (from, total int64, ok bool) {
	rest, ok := strings.CutPrefix(text, "bytes ")
	span, whole, found := strings.Cut(rest, "/")
	first, _, dash := strings.Cut(span, "-")
	if !ok || !found || !dash {
		return 0, 0, false
	}
	from, err := strconv.ParseInt(first, 10, 64)
	if err != nil || from < 0 {
		return 0, 0, false
	}
	if whole == "*" {
		return from, -1, true
	}
	total, err = strconv.ParseInt(whole, 10, 64)
	return from, total, err == nil && total > from
}

// part is the incomplete download of an earlier attempt.
type part struct {
	ref       string
	validator string
	offset    int64
}

func (p part) addTo(req *http.Request) {
	if p.offset == 0 {
		return
	}
	req.Header.Set("Range", fmt.Sprintf("bytes=%d-", p.offset))
	if p.validator != "" {
		req.Header.Set("If-Range", p.validator)
	}
}

// refPrefix begins the names of this download's parts. Parts for another digest or from another boot have another
// prefix.
func (d *download) refPrefix() string {
	origin := string(d.want)
	if origin == "" {
		origin = d.boot
	}
	return "download-" + d.source + "-" + origin + "-"
}
