package image

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"path"
	"strings"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/disk"
	"github.com/tripod-run/tripod/internal/image/disk/qcow2"
	"github.com/tripod-run/tripod/internal/image/internal/download"
	"github.com/tripod-run/tripod/internal/image/internal/download/translation"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/keys"
)

// downloaded makes the image of a translated name, whose disk is downloaded.
type downloaded struct {
	*Store
	named    reference.Named
	endpoint *translation.Endpoint
	want     digest.Digest // expected digest of the file; "" if the name has none
	tracker  *tracker
	source   string // see download.SourceOf
}

// run makes the image available, and reports whether anything was downloaded.
func (d *downloaded) run(ctx context.Context) (img Image, downloaded bool, err error) {
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
	transfer := &download.Transfer{
		Endpoint: d.endpoint, Source: d.source, Want: d.want, Boot: d.boot, Limit: d.cfg.Limits.UnpackedBytes,
		Content: d.content, Commit: d.commitBlob, Progress: d.tracker,
	}
	got, err := transfer.Fetch(ctx, cached)
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
	if img, err = d.recordAs(ctx, details, got.Validators); err != nil {
		return Image{}, false, err
	}
	// The digest is known now, so also release the leases that earlier downloads took under name@digest.
	if _, settle, err := d.lease(ctx, d.names(details)); err == nil {
		settle(false)
	}
	return img, true, nil
}

// known returns the newest intact image that was downloaded from the URL and has the expected digest, or nil if there
// is none. The validators are those that the server sent with the image.
func (d *downloaded) known(ctx context.Context) (*entry, download.Validators, error) {
	records, err := d.records.List(ctx, filters(keys.Source, d.source)...)
	if err != nil {
		return nil, download.Validators{}, err
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
		return nil, download.Validators{}, nil
	}
	return found, download.Validators{ETag: keys.Value(last.Labels, keys.ETag), Modified: keys.Value(last.Labels, keys.LastModified)}, nil
}

// assemble makes an image from a downloaded file: it makes a manifest, and checks the manifest and the file as if they
// came from a registry.
func (d *downloaded) assemble(ctx context.Context, got *download.File) (*details, error) {
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
func (d *downloaded) describeDisk(ctx context.Context, got *download.File) (ocispec.Descriptor, error) {
	ra, err := d.content.ReaderAt(ctx, got.Descriptor)
	if err != nil {
		return got.Descriptor, err
	}
	defer ra.Close()
	mediaType, head, err := disk.Sniff(content.NewReader(ra), path.Base(d.endpoint.URL.Path))
	if err != nil {
		return got.Descriptor, err
	}
	if said := http.DetectContentType(head); !qcow2.Is(head) && strings.HasPrefix(said, "text/") {
		return got.Descriptor, failure.Invalidf("the server sent %s (type %q), which is not a disk: %.60q", said, got.ContentType, head)
	}
	layer := got.Descriptor
	layer.MediaType = mediaType
	return layer, nil
}

// recordAs records an image under the translated name, and under the name with the file's digest.
func (d *downloaded) recordAs(ctx context.Context, of *details, version download.Validators) (Image, error) {
	labels := map[string]string{keys.Source: d.source}
	if version.ETag != "" {
		labels[keys.ETag] = version.ETag
	}
	if version.Modified != "" {
		labels[keys.LastModified] = version.Modified
	}
	return d.record(ctx, of, of.manifest, d.names(of), labels)
}

// recordExisting records an existing image under the requested name, and returns the image.
func (d *downloaded) recordExisting(ctx context.Context, known *entry, cached download.Validators) (Image, error) {
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
func (d *downloaded) names(of *details) []string {
	names := []string{d.named.String()}
	if d.want == "" {
		names = append(names, reference.TrimNamed(d.named).String()+"@"+of.disk.Digest.String())
	}
	return names
}

// downloadManifest returns the manifest of a downloaded disk. The manifest depends only on the file, not on where the
// file came from.
func downloadManifest(layer ocispec.Descriptor) (config Blob, manifest ocispec.Manifest) {
	config = NewBlob(disk.MediaTypeDownload, []byte("{}"))
	return config, ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest,
		ArtifactType: disk.MediaTypeDownload, Config: config.Descriptor, Layers: []ocispec.Descriptor{layer},
	}
}
