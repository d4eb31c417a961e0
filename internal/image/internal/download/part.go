package download

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
)

// part finds an incomplete download that can be resumed.
func (d *Transfer) part(ctx context.Context) (part, error) {
	all, err := d.Content.ListStatuses(ctx)
	if err != nil {
		return part{}, err
	}
	for _, status := range all {
		encoded, ok := strings.CutPrefix(status.Ref, d.refPrefix())
		if !ok || status.Offset == 0 {
			continue
		}
		validator, err := base64.RawURLEncoding.DecodeString(encoded)
		if err != nil || len(validator) == 0 && d.Want == "" {
			continue // without a digest or a validator, the part may belong to another file
		}
		return part{status.Ref, string(validator), status.Offset}, nil
	}
	return part{}, nil
}

// drop deletes a part.
func (d *Transfer) drop(ctx context.Context, ref string) error {
	if ref == "" {
		return nil
	}
	if err := d.Content.Abort(context.WithoutCancel(ctx), ref); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	return nil
}

// saveBody stores the body of a response. The body begins at the given offset of the file. The total is the size of the
// whole file, or -1 if it is unknown. If it fails, it keeps the part for the next attempt, unless that could not use it.
func (d *Transfer) saveBody(ctx context.Context, resp *http.Response, have part, from, total int64) (*File, error) {
	got := &File{Validators: validatorsOf(resp.Header), ContentType: resp.Header.Get("Content-Type")}
	ref := have.ref
	if from == 0 {
		if ref = d.refPrefix() + base64.RawURLEncoding.EncodeToString([]byte(got.rangeValidator(resp.Header))); have.ref != ref {
			if err := d.drop(ctx, have.ref); err != nil {
				return nil, err
			}
		}
	}
	if limit := d.Limit; total > limit {
		return nil, errors.Join(fmt.Errorf("the file has %d bytes, more than the limit of %d: %w", total, limit, errdefs.ErrResourceExhausted),
			d.drop(ctx, ref))
	}
	w, err := d.openPart(ctx, ref, from)
	if err != nil {
		return nil, err
	}
	defer w.Close()
	d.Progress.Begin(max(total, 0))
	size, err := d.copy(w, resp.Body, from)
	switch {
	case err != nil:
	case total >= 0 && size != total:
		err = fmt.Errorf("the file ends after %d bytes of %d: %w", size, total, io.ErrUnexpectedEOF)
	case size == 0:
		err = failure.Invalidf("the file is empty")
	}
	useless := errdefs.IsResourceExhausted(err) || errdefs.IsInvalidArgument(err)
	if err == nil {
		got.Descriptor = ocispec.Descriptor{Digest: w.Digest(), Size: size}
		err = d.checkWanted(got.Descriptor, from)
		useless = err != nil
	}
	if useless {
		err = errors.Join(err, w.Close(), d.drop(ctx, ref))
	}
	if err == nil {
		err = failDownload.Hit(ctx)
	}
	if err != nil {
		return nil, err
	}
	return got, d.Commit(ctx, w, got.Descriptor)
}

// openPart opens a part for writing at an offset: at the beginning, which empties it, or at its end.
func (d *Transfer) openPart(ctx context.Context, ref string, from int64) (content.Writer, error) {
	w, err := d.Content.Writer(ctx, content.WithRef(ref))
	if err != nil {
		return nil, err
	}
	status, err := w.Status()
	switch {
	case err != nil || from == status.Offset:
	case from == 0:
		err = w.Truncate(0)
	default:
		err = fmt.Errorf("resume a part of %d bytes: it has %d: %w", from, status.Offset, errdefs.ErrUnavailable)
	}
	if err != nil {
		w.Close()
		return nil, err
	}
	return w, nil
}

// checkWanted returns an error if a digest was requested, and the file has another one. from is where the last response began.
func (d *Transfer) checkWanted(file ocispec.Descriptor, from int64) error {
	switch {
	case d.Want == "" || file.Digest == d.Want:
		return nil
	case from > 0: // the part belonged to another file: start over
		return fmt.Errorf("the file has changed: %w", io.ErrUnexpectedEOF)
	default:
		return fmt.Errorf("the server sent a different file, of %d bytes with the digest %s: %w", file.Size, file.Digest, errdefs.ErrDataLoss)
	}
}

// copy writes the body and enforces the size limit.
func (d *Transfer) copy(w io.Writer, body io.Reader, from int64) (size int64, err error) {
	buf := make([]byte, 256<<10)
	for size = from; ; {
		d.at = max(d.at, size)
		d.Progress.Reached("", size)
		n, err := body.Read(buf)
		if n > 0 {
			d.Progress.Touch()
			if size += int64(n); size > d.Limit {
				return size, fmt.Errorf("the file has more bytes than the limit of %d: %w", d.Limit, errdefs.ErrResourceExhausted)
			}
			if _, err := w.Write(buf[:n]); err != nil {
				return size, err
			}
		}
		if err == io.EOF {
			return size, nil
		} else if err != nil {
			// Errors from reading the body are network errors.
			return size, fmt.Errorf("after %d bytes: %w (%w)", size, err, io.ErrUnexpectedEOF)
		}
	}
}
