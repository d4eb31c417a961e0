package image

import (
	"context"
	"maps"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/distribution/reference"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/keys"
)

// former returns labels with the keys of earlier versions, or nil if they are the same.
func former(labels map[string]string) map[string]string {
	old := map[string]string{}
	for key, value := range labels {
		if strings.HasPrefix(key, keys.Domain) {
			key = keys.Former(key)
		}
		old[key] = value
	}
	if maps.Equal(old, labels) {
		return nil
	}
	return old
}

// TestLabelsOfEarlierVersions: a store whose labels have the domain of earlier versions is read as before: what holds images, what a
// snapshot is for, which images peers may read, and what was downloaded from where.
func TestLabelsOfEarlierVersions(t *testing.T) {
	reg, files := newRegistry(t), newFiles(t)
	files.put("/disk", randomBytes(t, 5000), `"1"`)
	cfg := Config{Root: t.TempDir(), Translation: files.translations(t)}
	s := open(t, cfg)
	img := pull(t, s, reg.push(t, "app:1", imageOf(t, v1.Config{}, tarOf(t, file("a", "b")))))
	machine := pull(t, s, "virtlet.cloud/disk")
	ctx := s.withNamespace(t.Context())
	_, err := s.View(ctx, "view", img.ID)
	require.NoError(t, err)
	_, err = s.OpenDisk(ctx, "machine", machine.ID)
	require.NoError(t, err)

	changed := 0
	var infos []snapshots.Info
	require.NoError(t, s.snaps.Walk(ctx, func(_ context.Context, info snapshots.Info) error { infos = append(infos, info); return nil }))
	for _, info := range infos {
		if info.Labels = former(info.Labels); info.Labels != nil {
			_, err := s.snaps.Update(ctx, info)
			require.NoError(t, err)
			changed++
		}
	}
	records, err := s.records.List(ctx)
	require.NoError(t, err)
	for _, r := range records {
		if r.Labels = former(r.Labels); r.Labels != nil {
			_, err := s.records.Update(ctx, r)
			require.NoError(t, err)
			changed++
		}
	}
	held, err := s.leases.List(ctx)
	require.NoError(t, err)
	for _, l := range held {
		old := former(l.Labels)
		if old == nil {
			continue
		}
		resources, err := s.leases.ListResources(ctx, l)
		require.NoError(t, err)
		require.NoError(t, s.leases.Delete(ctx, l))
		l, err = s.leases.Create(ctx, leases.WithID(l.ID), leases.WithLabels(old))
		require.NoError(t, err)
		for _, r := range resources {
			require.NoError(t, s.leases.AddResource(ctx, l, r))
		}
		changed++
	}
	require.GreaterOrEqual(t, changed, 4, "a view, a lease, and two names")

	require.NoError(t, s.Close())
	s = open(t, cfg)
	ctx = s.withNamespace(t.Context())
	views, err := s.Snapshots(ctx)
	require.NoError(t, err)
	require.Equal(t, []string{"view"}, views)
	disks, err := s.Disks(ctx)
	require.NoError(t, err)
	require.Equal(t, []string{"machine"}, disks)
	_, text := openAndRead(t, s, "machine", machine.ID)
	require.NotEmpty(t, text)
	named, err := reference.ParseNormalizedNamed(reg.host + "/app")
	require.NoError(t, err)
	require.Equal(t, machine.ID, pull(t, s, "virtlet.cloud/disk").ID)
	require.EqualValues(t, 5000, files.sent.Load(), "what has not changed is not downloaded again")
	require.Len(t, sharedImages{s}.Served(ctx, named, false), 2, "the tag and the digest")
}
