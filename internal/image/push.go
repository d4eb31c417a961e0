package image

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/image/registry"
)

// Blob is a blob in memory or in a file.
type Blob struct {
	ocispec.Descriptor
	Data []byte
	// Path is the file of a blob without Data.
	Path string
}

func NewBlob(mediaType string, data []byte) Blob {
	return Blob{Descriptor: ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(data), Size: int64(len(data))}, Data: data}
}

// DigestReference returns name@digest for a manifest that is pushed to ref.
func DigestReference(ref string, manifest digest.Digest) (string, error) {
	named, err := reference.ParseDockerRef(ref)
	if err != nil {
		return "", failure.Invalidf("image reference %q: %v", ref, err)
	}
	if canonical, ok := named.(reference.Canonical); ok && canonical.Digest() != manifest {
		return "", failure.Invalidf("image reference %q: the digest of the pushed image is %s", ref, manifest)
	}
	return reference.TrimNamed(named).String() + "@" + manifest.String(), nil
}

// Push uploads blobs and then the manifest that refers to them, under the tag of ref. It skips blobs that the registry
// already has, and returns name@digest. auth may be nil. Push calls report, if it is not nil, while it sends; blobs that the
// registry has count as sent. The errors are those of Store.Pull.
func Push(ctx context.Context, to registry.Config, ref string, auth *registry.Auth, report func(Progress), manifest Blob,
	blobs ...Blob) (name string, err error) {
	if name, err = DigestReference(ref, manifest.Digest); err != nil {
		return "", err
	}
	named, err := reference.ParseDockerRef(ref)
	if err != nil {
		return "", err
	}
	defer func() {
		if err != nil {
			err = failure.Classify(ctx, fmt.Sprintf("push %q to %s", named, reference.Domain(named)), err)
		}
	}()
	resolver, _, err := to.Resolver(ctx, named, auth)
	if err != nil {
		return "", err
	}
	target := name
	if tagged, ok := named.(reference.Tagged); ok {
		// Given tag@digest, containerd's pusher adds the tag to the manifest with this digest.
		target = reference.TrimNamed(named).String() + ":" + tagged.Tag() + "@" + manifest.Digest.String()
	}
	pusher, err := resolver.Pusher(ctx, target)
	if err != nil {
		return "", err
	}
	all := append(blobs[:len(blobs):len(blobs)], manifest)
	if report == nil {
		report = func(Progress) {}
	}
	var sent Progress
	for _, blob := range all {
		sent.Total += blob.Size
	}
	for _, blob := range all {
		begin := sent.Done
		err := push(ctx, pusher, blob, func(n int64) {
			sent.Done, sent.Current = begin+n, blob.Digest
			report(sent)
		})
		if err != nil {
			return "", fmt.Errorf("%s %s: %w", blob.MediaType, blob.Digest, err)
		}
		sent.Done, sent.Current = begin+blob.Size, blob.Digest
		report(sent)
	}
	return name, nil
}

// push uploads one blob unless the registry has it. It calls report with the number of bytes sent.
func push(ctx context.Context, pusher remotes.Pusher, blob Blob, report func(int64)) error {
	writer, err := pusher.Push(ctx, blob.Descriptor)
	if errdefs.IsAlreadyExists(err) {
		return nil
	} else if err != nil {
		return err
	}
	defer writer.Close()
	var reader io.ReadSeeker = bytes.NewReader(blob.Data)
	if blob.Data == nil {
		file, err := os.Open(blob.Path)
		if err != nil {
			return err
		}
		defer file.Close()
		reader = file
	}
	err = content.Copy(ctx, writer, &meter{ReadSeeker: reader, report: report}, blob.Size, blob.Digest)
	if errdefs.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// meter reports how far its reader has been read. An upload that begins again seeks back.
type meter struct {
	io.ReadSeeker
	at     int64
	report func(at int64)
}

func (m *meter) Read(p []byte) (int, error) {
	n, err := m.ReadSeeker.Read(p)
	m.at += int64(n)
	m.report(m.at)
	return n, err
}

func (m *meter) Seek(offset int64, whence int) (int64, error) {
	at, err := m.ReadSeeker.Seek(offset, whence)
	if err == nil {
		m.at = at
	}
	return at, err
}
