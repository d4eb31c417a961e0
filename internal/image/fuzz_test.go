package image

import (
	"testing"

	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// FuzzDocuments feeds a registry's possible answers to all parsers. Accepted documents must respect the limits, name no
// foreign URL, and be of a known kind; refusals must blame the image.
func FuzzDocuments(f *testing.F) {
	for _, seed := range []string{
		`{"schemaVersion":2,"config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a","size":2},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":"sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a","size":2,"urls":["http://x"]}]}`,
		`{"schemaVersion":2,"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"sha256:44","size":2,"platform":{"os":"linux","architecture":"amd64"}}]}`,
		`{"os":"linux","architecture":"amd64","rootfs":{"type":"layers","diff_ids":["sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"]}}`,
		`{"layers":[null],"config":null}`, `[]`, `{}`, ``,
	} {
		f.Add([]byte(seed))
	}
	cfg := Config{Root: "/nowhere"}
	cfg.setDefaults()
	matcher := platforms.Default()
	f.Fuzz(func(t *testing.T, document []byte) {
		desc := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageManifest, Digest: digest.FromBytes(document), Size: int64(len(document))}
		if child, err := choose(desc, document, matcher); err == nil && len(child.URLs)+len(child.Annotations) > 0 {
			t.Errorf("choose() = %+v, want no URLs and no annotations", child)
		} else if err != nil && !errdefs.IsInvalidArgument(err) && !errdefs.IsNotFound(err) {
			t.Errorf("choose() returned an error of the wrong class: %v", err)
		}
		d, err := parseManifest(desc, document, cfg.Limits)
		if err != nil {
			if !errdefs.IsInvalidArgument(err) {
				t.Errorf("parseManifest() returned an error of the wrong class: %v", err)
			}
			d = &details{kind: KindRootfs, config: desc, layers: make([]ocispec.Descriptor, 1)}
		} else if len(d.layers) == 0 || len(d.layers) > cfg.Limits.Layers || d.size > cfg.Limits.UnpackedBytes || d.kind == "" {
			t.Errorf("parseManifest() accepted an invalid manifest: %+v", d)
		}
		for _, l := range d.layers {
			if len(l.URLs)+len(l.Annotations)+len(l.Data) > 0 {
				t.Errorf("layer %+v has URLs, annotations or data, want none", l)
			}
		}
		if err := d.setConfig(document, matcher); err != nil && !errdefs.IsInvalidArgument(err) {
			t.Errorf("setConfig() returned an error of the wrong class: %v", err)
		} else if err == nil && (d.id == "" || d.kind == KindRootfs && d.chainID() == "") {
			t.Errorf("setConfig() accepted an invalid config: %+v", d)
		}
	})
}
