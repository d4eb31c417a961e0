package download

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/image/internal/download/translation"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
)

var failDownload = failpoint.New("image.download.commit")

// maxValidator limits the bytes of a remembered ETag.
const maxValidator = 512

// Transfer is the download of one file.
//
//	known? ── If-None-Match ──▶ 304  the image is unchanged
//	part?  ── Range, If-Range ─▶ 206  resume the part       200  start over
//
// A part is an ingest of the content store. The part's name contains a hash of the URL. It also contains the expected
// digest or the server's validator, so that it identifies the version of the file. A part is therefore never continued
// with another file. Without a digest for a final check, a part from before a reboot is not resumed: it may have lost
// data in a power failure (fault V4).
type Transfer struct {
	Endpoint *translation.Endpoint
	// Source identifies the URL in the names of parts; see SourceOf.
	Source string
	// Want is the expected digest of the file; "" if it is not known.
	Want digest.Digest
	// Boot identifies this boot of the node.
	Boot string
	// Limit is the most bytes that the file may have.
	Limit int64
	// Content has the parts, and Commit turns a complete one into a blob.
	Content Ingests
	Commit  func(ctx context.Context, w content.Writer, file ocispec.Descriptor) error
	// Progress learns how far the download is.
	Progress Progress

	client *http.Client
	at     int64 // bytes already stored
}

// Progress learns of a transfer's progress.
type Progress interface {
	// Busy marks the start of work that should make progress; the returned function marks its end.
	Busy() func()
	// Touch is called when bytes arrive. It must be quick.
	Touch()
	// Begin sets the size of the file, 0 if it is not known.
	Begin(total int64)
	// Reached sets how many bytes are stored. The number decreases if the transfer starts over.
	Reached(blob digest.Digest, offset int64)
}

// Ingests are the parts of a content store.
type Ingests interface {
	content.Ingester
	content.IngestManager
}

// Validators are the server's ETag and modification date of a file.
type Validators struct{ ETag, Modified string }

// File is a completely downloaded file.
type File struct {
	ocispec.Descriptor
	Validators
	// ContentType is the server's media type.
	ContentType string
}

// Fetch downloads the file and resumes broken transfers. It returns nil if the server still has the cached version.
func (d *Transfer) Fetch(ctx context.Context, cached Validators) (*File, error) {
	d.client = d.Endpoint.Transport.Client()
	defer d.client.CloseIdleConnections()
	defer d.Progress.Busy()()
	for idle := 0; ; idle++ {
		before := d.at
		got, err := d.attempt(ctx, cached)
		if err == nil {
			return got, nil
		}
		if d.at > before {
			idle = 0
		}
		err = Classify(err)
		if ctx.Err() != nil || errdefs.IsFailedPrecondition(err) || !failure.Transient(err) || idle == failure.MaxIdleRetries {
			return nil, err
		}
		select {
		case <-time.After(failure.RetryPace):
		case <-ctx.Done():
		}
	}
}

// attempt makes one request.
func (d *Transfer) attempt(ctx context.Context, cached Validators) (*File, error) {
	have, err := d.part(ctx)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, d.Endpoint.URL.String(), nil)
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
	d.Progress.Touch()
	switch resp.StatusCode {
	case http.StatusNotModified:
		if cached == (Validators{}) {
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
		Status: resp.Status, StatusCode: resp.StatusCode, RequestMethod: http.MethodGet, RequestURL: RedactURL(d.Endpoint.URL),
	}
}

// addTo adds a condition to the request: the server sends the file only if the file's current validators differ from v.
func (v Validators) addTo(req *http.Request) {
	if v.ETag != "" {
		req.Header.Set("If-None-Match", v.ETag)
	} else if v.Modified != "" {
		req.Header.Set("If-Modified-Since", v.Modified)
	}
}

func validatorsOf(h http.Header) Validators {
	v := Validators{h.Get("ETag"), h.Get("Last-Modified")}
	if len(v.ETag) > maxValidator {
		v.ETag = ""
	}
	if _, err := http.ParseTime(v.Modified); err != nil {
		v.Modified = ""
	}
	return v
}

// rangeValidator returns the validator for If-Range: a strong ETag or, if the server sent no ETag, a modification date
// at least a minute before the response's date (RFC 9110, 8.8.2.2); otherwise "".
func (v Validators) rangeValidator(h http.Header) string {
	if v.ETag != "" {
		if strings.HasPrefix(v.ETag, "W/") {
			return ""
		}
		return v.ETag
	}
	modified, err := http.ParseTime(v.Modified)
	now, dateErr := http.ParseTime(h.Get("Date"))
	if err != nil || dateErr != nil || now.Sub(modified) < time.Minute {
		return ""
	}
	return v.Modified
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
func (d *Transfer) refPrefix() string {
	origin := string(d.Want)
	if origin == "" {
		origin = d.Boot
	}
	return "download-" + d.Source + "-" + origin + "-"
}
