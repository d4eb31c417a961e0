package image

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"
	"strings"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/image/qcow2"
)

// Labels on the records of translated names: the source of the disk, and the validators that the server sent with the
// disk.
const (
	labelSource   = "tripod.run/source"
	labelETag     = "tripod.run/etag"
	labelModified = "tripod.run/last-modified"
)

// part finds an incomplete download that can be resumed.
func (d *download) part(ctx context.Context) (part, error) {
	all, err := d.content.ListStatuses(ctx)
	if err != nil {
		return part{}, err
	}
	for _, status := range all {
		encoded, ok := strings.CutPrefix(status.Ref, d.refPrefix())
		if !ok || status.Offset == 0 {
			continue
		}
		validator, err := base64.RawURLEncoding.DecodeString(encoded)
		if err != nil || len(validator) == 0 && d.want == "" {
			continue // without a digest or a validator, the part may belong to another file
		}
		return part{status.Ref, string(validator), status.Offset}, nil
	}
	return part{}, nil
}

// drop deletes a part.
func (d *download) drop(ctx context.Context, ref string) error {
	if ref == "" {
		return nil
	}
	if err := d.content.Abort(context.WithoutCancel(ctx), ref); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	return nil
}

// saveBody stores the body of a response. The body begins at the given offset of the file. The total is the size of the
// whole file, or -1 if it is unknown. If it fails, it keeps the part for the next attempt, unless that could not use it.
func (d *download) saveBody(ctx context.Context, resp *http.Response, have part, from, total int64) (*fetched, error) {
	got := &fetched{validators: validatorsOf(resp.Header), contentType: resp.Header.Get("Content-Type")}
	ref := have.ref
	if from == 0 {
		if ref = d.refPrefix() + base64.RawURLEncoding.EncodeToString([]byte(got.rangeValidator(resp.Header))); have.ref != ref {
			if err := d.drop(ctx, have.ref); err != nil {
				return nil, err
			}
		}
	}
	if limit := d.cfg.Limits.UnpackedBytes; total > limit {
		return nil, errors.Join(fmt.Errorf("the file has %d bytes, more than the limit of %d: %w", total, limit, errdefs.ErrResourceExhausted), d.drop(ctx, ref))
	}
	w, err := d.openPart(ctx, ref, from)
	if err != nil {
		return nil, err
	}
	defer w.Close()
	d.tracker.begin(max(total, 0))
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
		got.Descriptor = ocispec.Descriptor{MediaType: MediaTypeDiskRaw, Digest: w.Digest(), Size: size}
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
	return got, d.commitBlob(ctx, w, got.Descriptor)
}

// openPart opens a part for writing at an offset: at the beginning, which empties it, or at its end.
func (d *download) openPart(ctx context.Context, ref string, from int64) (content.Writer, error) {
	w, err := d.content.Writer(ctx, content.WithRef(ref))
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
func (d *download) checkWanted(file ocispec.Descriptor, from int64) error {
	switch {
	case d.want == "" || file.Digest == d.want:
		return nil
	case from > 0: // the part belonged to another file: start over
		return fmt.Errorf("the file has changed: %w", io.ErrUnexpectedEOF)
	default:
		return fmt.Errorf("the server sent a different file, of %d bytes with the digest %s: %w", file.Size, file.Digest, errdefs.ErrDataLoss)
	}
}

// copy writes the body and enforces the size limit.
func (d *download) copy(w io.Writer, body io.Reader, from int64) (size int64, err error) {
	buf := make([]byte, 256<<10)
	for size = from; ; {
		d.at = max(d.at, size)
		d.tracker.reached("", size)
		n, err := body.Read(buf)
		if n > 0 {
			d.tracker.Touch()
			if size += int64(n); size > d.cfg.Limits.UnpackedBytes {
				return size, fmt.Errorf("the file has more bytes than the limit of %d: %w", d.cfg.Limits.UnpackedBytes, errdefs.ErrResourceExhausted)
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

// known returns the newest intact image that was downloaded from the URL and has the expected digest, or nil if there
// is none. The validators are those that the server sent with the image.
func (d *download) known(ctx context.Context) (*entry, validators, error) {
	records, err := d.records.List(ctx, fmt.Sprintf("labels.%q==%q", labelSource, d.source))
	if err != nil {
		return nil, validators{}, err
	}
	var last *images.Image
	var found *entry
	for i, record := range records {
		e, err := d.index.find(record.Name)
		if err != nil || e.details.disk == nil || d.want != "" && e.details.disk.Digest != d.want {
			continue
		}
		if (last == nil || record.UpdatedAt.After(last.UpdatedAt)) && d.intact(ctx, e.details) {
			last, found = &records[i], e
		}
	}
	if last == nil {
		return nil, validators{}, nil
	}
	return found, validators{last.Labels[labelETag], last.Labels[labelModified]}, nil
}

// assemble makes an image from a downloaded file: it makes a manifest, and checks the manifest and the file as if they
// came from a registry.
func (d *download) assemble(ctx context.Context, got *fetched) (*details, error) {
	layer, err := d.describeDisk(ctx, got)
	if err != nil {
		return nil, err
	}
	config, m := downloadManifest(layer)
	document, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	manifest := NewBlob(m.MediaType, document)
	for _, blob := range []Blob{config, manifest} {
		if err := d.dropDamaged(ctx, blob.Descriptor); err != nil {
			return nil, err
		}
		err := content.WriteBlob(ctx, d.content, "download-"+blob.Digest.String(), strings.NewReader(string(blob.Data)), blob.Descriptor)
		if err != nil {
			return nil, err
		}
	}
	p := &puller{Store: d.Store, named: d.named, tracker: d.tracker}
	if err := p.label(ctx, manifest.Descriptor, config.Descriptor, layer); err != nil {
		return nil, err
	}
	parsed, err := parseManifest(manifest.Descriptor, document, d.cfg.Limits)
	if err != nil {
		return nil, err
	}
	if err := parsed.setConfig(config.Data, d.platform); err != nil {
		return nil, err
	}
	return parsed, d.checkArtifact(ctx, parsed)
}

// describeDisk determines the media type of a downloaded disk from the URL's file name or, failing that, the file's
// first bytes. This happens only once, because the manifest records the type.
func (d *download) describeDisk(ctx context.Context, got *fetched) (ocispec.Descriptor, error) {
	ra, err := d.content.ReaderAt(ctx, got.Descriptor)
	if err != nil {
		return got.Descriptor, err
	}
	defer ra.Close()
	mediaType, head, err := sniffDisk(content.NewReader(ra), path.Base(d.endpoint.URL.Path))
	if err != nil {
		return got.Descriptor, err
	}
	if said := http.DetectContentType(head); !qcow2.Is(head) && strings.HasPrefix(said, "text/") {
		return got.Descriptor, failure.Invalidf("the server sent %s (type %q), which is not a disk: %.60q", said, got.contentType, head)
	}
	layer := got.Descriptor
	layer.MediaType = mediaType
	return layer, nil
}

// recordAs records an image under the translated name, and under the name with the file's digest.
func (d *download) recordAs(ctx context.Context, of *details, version validators) (Image, error) {
	labels := map[string]string{labelSource: d.source}
	if version.etag != "" {
		labels[labelETag] = version.etag
	}
	if version.modified != "" {
		labels[labelModified] = version.modified
	}
	return d.record(ctx, of, of.manifest, d.names(of), labels)
}

// recordExisting records an existing image under the requested name, and returns the image.
func (d *download) recordExisting(ctx context.Context, known *entry, cached validators) (Image, error) {
	if img, ok := d.current(ctx, d.named, known.details.manifest); ok {
		return img, nil
	}
	// The lease keeps the image's content until the new record exists, even if the image is removed in the meantime.
	ctx, release, err := d.lease(ctx, d.names(known.details))
	if err != nil {
		return Image{}, err
	}
	defer release(false)
	id, _ := leases.FromContext(ctx)
	resource := leases.Resource{ID: known.details.manifest.Digest.String(), Type: "content"}
	if err := d.leases.AddResource(ctx, leases.Lease{ID: id}, resource); err != nil {
		return Image{}, err
	}
	if !d.intact(ctx, known.details) {
		return Image{}, fmt.Errorf("image %s was just removed: %w", known.image.ID, errdefs.ErrUnavailable)
	}
	return d.recordAs(ctx, known.details, cached)
}

// names returns the references to record for the image.
func (d *download) names(of *details) []string {
	names := []string{d.named.String()}
	if d.want == "" {
		names = append(names, reference.TrimNamed(d.named).String()+"@"+of.disk.Digest.String())
	}
	return names
}
