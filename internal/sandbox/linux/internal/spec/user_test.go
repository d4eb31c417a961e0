package spec

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestUser(t *testing.T) {
	root := testRootfs(t)
	strict := runtimeapi.SupplementalGroupsPolicy_Strict
	for name, c := range map[string]struct {
		sc    *runtimeapi.LinuxContainerSecurityContext
		image string
		want  specs.User
	}{
		"no user":             {want: specs.User{AdditionalGids: []uint32{0}}},
		"image name":          {image: "app", want: specs.User{UID: 1000, GID: 1001, AdditionalGids: []uint32{1001, 50000, 50001}}},
		"image uid of passwd": {image: "1000", want: specs.User{UID: 1000, GID: 1001, AdditionalGids: []uint32{1001, 50000, 50001}}},
		"image unknown uid":   {image: "77", want: specs.User{UID: 77, AdditionalGids: []uint32{0}}},
		"image uid:gid":       {image: "77:88", want: specs.User{UID: 77, GID: 88, AdditionalGids: []uint32{88}}},
		"image name:group":    {image: "app:extra", want: specs.User{UID: 1000, GID: 50000, AdditionalGids: []uint32{50000, 50001}}},
		"image uid:group":     {image: "5:app", want: specs.User{UID: 5, GID: 1001, AdditionalGids: []uint32{1001}}},
		"image name:gid":      {image: "app:9", want: specs.User{UID: 1000, GID: 9, AdditionalGids: []uint32{9, 50000, 50001}}},
		"a number is no name": {image: "4242", want: specs.User{UID: 4242, AdditionalGids: []uint32{0}}},
		"request over image": {sc: &runtimeapi.LinuxContainerSecurityContext{RunAsUser: int64Value(3)}, image: "app:extra",
			want: specs.User{UID: 3, AdditionalGids: []uint32{0}}},
		"request by name": {sc: &runtimeapi.LinuxContainerSecurityContext{RunAsUsername: "app"}, image: "root",
			want: specs.User{UID: 1000, GID: 1001, AdditionalGids: []uint32{1001, 50000, 50001}}},
		"request with a group": {sc: &runtimeapi.LinuxContainerSecurityContext{RunAsUser: int64Value(3), RunAsGroup: int64Value(0)},
			want: specs.User{UID: 3, AdditionalGids: []uint32{0}}},
		"merge": {
			sc:   &runtimeapi.LinuxContainerSecurityContext{RunAsUser: int64Value(1000), SupplementalGroups: []int64{70000, 50000, 5}},
			want: specs.User{UID: 1000, GID: 1001, AdditionalGids: []uint32{1001, 5, 50000, 50001, 70000}},
		},
		"strict": {
			sc: &runtimeapi.LinuxContainerSecurityContext{RunAsUser: int64Value(1000), SupplementalGroups: []int64{70000},
				SupplementalGroupsPolicy: strict},
			want: specs.User{UID: 1000, GID: 1001, AdditionalGids: []uint32{1001, 70000}},
		},
	} {
		require.NoError(t, checkUser(c.sc), name)
		got, _, err := user(c.sc, c.image, root)
		require.NoError(t, err, name)
		assert.Equal(t, c.want, got, name)
	}
}

// TestUserRefused tests fault I2: IDs out of range are refused and never wrap around to root.
func TestUserRefused(t *testing.T) {
	root := testRootfs(t)
	for _, image := range []string{
		"absent", "app:absent", "2147483648", "4294967296", "18446744073709551616", "-1", "0:4294967296", "huge", "minus", "root:hugegroup",
	} {
		_, _, err := user(nil, image, root)
		requireRefused(t, err, errInvalid, "image USER")
	}
	_, _, err := user(&runtimeapi.LinuxContainerSecurityContext{RunAsUsername: "absent"}, "", root)
	requireRefused(t, err, errInvalid, "run_as_username")
	for field, sc := range map[string]*runtimeapi.LinuxContainerSecurityContext{
		"run_as_group":               {RunAsGroup: int64Value(1)},
		"run_as_user":                {RunAsUser: int64Value(1), RunAsUsername: "app"},
		"run_as_user: -1":            {RunAsUser: int64Value(-1)},
		"run_as_group: 4294967296":   {RunAsUser: int64Value(1), RunAsGroup: int64Value(1 << 32)},
		"supplemental_groups: -5":    {SupplementalGroups: []int64{-5}},
		"supplemental_groups_policy": {SupplementalGroupsPolicy: 9},
		"run_as_username":            {RunAsUsername: "a\x00"},
		"supplemental_groups: 70000": {SupplementalGroups: make([]int64, 70000)},
	} {
		requireRefused(t, checkUser(sc), errInvalid, field)
	}
}

// TestUserFiles tests faults I2 and I3: huge files, symlinks out of the image, and files that are not regular.
func TestUserFiles(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "passwd")
	writeFile(t, secret, "app:x:1:1::/:\n")

	t.Run("absent", func(t *testing.T) {
		u, _, err := user(nil, "5", t.TempDir())
		require.NoError(t, err)
		assert.EqualValues(t, 5, u.UID)
	})
	t.Run("symlink out of the image", func(t *testing.T) {
		root := t.TempDir()
		require.NoError(t, os.MkdirAll(filepath.Join(root, "etc"), 0o755))
		require.NoError(t, os.Symlink(secret, filepath.Join(root, "etc/passwd")))
		_, _, err := user(nil, "app", root)
		requireRefused(t, err, errInvalid, "no user")
	})
	t.Run("symlink inside the image", func(t *testing.T) {
		root := testRootfs(t)
		require.NoError(t, os.Rename(filepath.Join(root, "etc/passwd"), filepath.Join(root, "users")))
		require.NoError(t, os.Symlink("/../../users", filepath.Join(root, "etc/passwd")))
		u, _, err := user(nil, "app", root)
		require.NoError(t, err)
		assert.EqualValues(t, 1000, u.UID)
	})
	t.Run("FIFO does not block", func(t *testing.T) {
		root := t.TempDir()
		require.NoError(t, os.MkdirAll(filepath.Join(root, "etc"), 0o755))
		require.NoError(t, unix.Mkfifo(filepath.Join(root, "etc/group"), 0o644))
		_, _, err := user(nil, "5", root)
		requireRefused(t, err, errInvalid, "not a regular file")
	})
	t.Run("larger than the bound", func(t *testing.T) {
		root := testRootfs(t)
		require.NoError(t, os.Truncate(filepath.Join(root, "etc/group"), maxUserFile+1))
		_, _, err := user(nil, "app", root)
		requireRefused(t, err, errInvalid, "larger than")
	})
	t.Run("more groups than the kernel takes", func(t *testing.T) {
		root := testRootfs(t)
		var b strings.Builder
		for i := range maxGroups + 1 {
			fmt.Fprintf(&b, "g%d:x:%d:app\n", i, i+2000)
		}
		writeFile(t, filepath.Join(root, "etc/group"), b.String())
		_, _, err := user(nil, "app", root)
		requireRefused(t, err, errInvalid, "supplemental_groups")
	})
}

func FuzzUser(f *testing.F) {
	f.Add("app:extra", testPasswd, testGroup)
	f.Add("5:6", "::::\n", "\x00:,")
	f.Fuzz(func(t *testing.T, image, passwd, group string) {
		root := t.TempDir()
		writeFile(t, filepath.Join(root, "etc/passwd"), passwd)
		writeFile(t, filepath.Join(root, "etc/group"), group)
		u, _, err := user(nil, image, root)
		if err != nil {
			require.ErrorIs(t, err, errInvalid)
			return
		}
		require.LessOrEqual(t, u.UID, uint32(maxID))
		require.LessOrEqual(t, u.GID, uint32(maxID))
		require.Equal(t, u.GID, u.AdditionalGids[0])
	})
}
