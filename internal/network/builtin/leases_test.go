package builtin

import (
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestSeenLeases checks that leases of other processes count, whether the directory shows the change or, within one tick of the
// file system's clock, does not; and that an address counts as fresh only as long as nobody can have had it.
func TestSeenLeases(t *testing.T) {
	dir := t.TempDir()
	store, err := openLeases(t.Context(), dir)
	require.NoError(t, err)
	defer store.release()
	reserve := func(id, ip string) {
		t.Helper()
		free, err := store.Reserve(id, "eth0", net.ParseIP(ip), "0")
		require.NoError(t, err)
		require.True(t, free)
	}
	write := func(ip, lease string) {
		t.Helper()
		require.NoError(t, os.WriteFile(filepath.Join(dir, ip), []byte(lease), 0o600))
	}
	found := func(id string) (ips []string) {
		for _, ip := range store.GetByID(id, "eth0") {
			ips = append(ips, ip.String())
		}
		return ips
	}
	// unnoticed changes the directory without a new time.
	unnoticed := func(change func()) {
		t.Helper()
		info, err := os.Stat(dir)
		require.NoError(t, err)
		change()
		require.NoError(t, os.Chtimes(dir, time.Time{}, info.ModTime()))
	}

	require.Empty(t, found("a"))
	reserve("a", "10.0.0.1")
	reserve("b", "10.0.0.2")
	write("10.0.0.3", "c")             // without an interface
	write("10.0.0.4", "d\r\neth0\r\n") // with an end of line
	write("last", "a\r\neth0")
	for id, ip := range map[string]string{"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3", "d": "10.0.0.4"} {
		require.Equal(t, []string{ip}, found(id))
	}
	require.NoError(t, store.ReleaseByID("a", "eth0"))
	require.Empty(t, found("a"))
	require.NoFileExists(t, filepath.Join(dir, "10.0.0.1"))

	unnoticed(func() { write("10.0.0.5", leaseOf("e", "eth0")) })
	require.Empty(t, found("e"), "leases that have been seen are not read again")
	require.NoError(t, store.ReleaseByID("e", "eth0"))
	require.NoFileExists(t, filepath.Join(dir, "10.0.0.5"))

	require.Equal(t, []string{"10.0.0.2"}, found("b"))
	unnoticed(func() { write("10.0.0.2", leaseOf("other", "eth0")) })
	require.Empty(t, found("b"), "the lease of another container")
	require.NoError(t, store.ReleaseByID("b", "eth0"))
	require.FileExists(t, filepath.Join(dir, "10.0.0.2"))
	require.Equal(t, []string{"10.0.0.2"}, found("other"))

	ip1, ip7 := []net.IP{net.ParseIP("10.0.0.1")}, []net.IP{net.ParseIP("10.0.0.7")}
	require.False(t, store.seen.fresh(ip1), "it is not known who has had it")
	store.seen.begin()
	require.True(t, store.seen.fresh(ip7))
	reserve("f", "10.0.0.7")
	require.True(t, store.seen.fresh(ip7))
	require.NoError(t, store.ReleaseByID("f", "eth0"))
	require.False(t, store.seen.fresh(ip7), "a pod has had it")
	require.False(t, store.seen.fresh(append(ip1, ip7...)))
	require.True(t, store.seen.fresh(ip1))
	write("10.0.0.8", leaseOf("g", "eth0"))
	require.NoError(t, store.ReleaseByID("none", "eth0"))
	require.False(t, store.seen.fresh(ip1), "others have changed the leases")

	require.NoError(t, os.RemoveAll(dir))
	require.NoError(t, os.Mkdir(dir, 0o700))
	require.Empty(t, found("d"), "the lease of a directory that was there before")
}
