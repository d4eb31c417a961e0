package qcow2

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/failpoint"
)

// qemuImg runs qemu-img (Debian package qemu-utils).
func qemuImg(t testing.TB, args ...string) []byte {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "qemu-img", args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("qemu-img %q: %v\n%s%s", args, err, out, stderr.Bytes())
	}
	return out
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func inspectFile(t testing.TB, path string) (*Info, error) {
	t.Helper()
	data, err := os.ReadFile(path)
	check(t, err)
	return Inspect(bytes.NewReader(data), int64(len(data)))
}

func wantRefused(t testing.TB, err error, words ...string) {
	t.Helper()
	if err == nil || !errdefs.IsInvalidArgument(err) {
		t.Fatalf("got error %v, want invalid argument", err)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("error %q does not contain %q", err, word)
		}
	}
}

func TestInspectImagesOfQEMU(t *testing.T) {
	dir := t.TempDir()
	for name, c := range map[string]struct {
		options string
		size    string
		want    Info
	}{
		"usual":     {"", "1G", Info{Version: 3, VirtualSize: 1 << 30, ClusterSize: 64 << 10}},
		"version 2": {"compat=0.10", "10M", Info{Version: 2, VirtualSize: 10 << 20, ClusterSize: 64 << 10}},
		"clusters":  {"cluster_size=2M", "8T", Info{Version: 3, VirtualSize: 8 << 40, ClusterSize: 2 << 20}},
		"small":     {"cluster_size=512,refcount_bits=64", "1M", Info{Version: 3, VirtualSize: 1 << 20, ClusterSize: 512}},
		"zstd":      {"compression_type=zstd", "1M", Info{Version: 3, VirtualSize: 1 << 20, ClusterSize: 64 << 10, Zstd: true}},
		"extended":  {"extended_l2=on", "1G", Info{Version: 3, VirtualSize: 1 << 30, ClusterSize: 64 << 10, ExtendedL2: true}},
		"lazy":      {"lazy_refcounts=on,preallocation=metadata", "64M", Info{Version: 3, VirtualSize: 64 << 20, ClusterSize: 64 << 10}},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(dir, strings.ReplaceAll(name, " ", "-"))
			args := []string{"create", "-q", "-f", "qcow2"}
			if c.options != "" {
				args = append(args, "-o", c.options)
			}
			qemuImg(t, append(args, path, c.size)...)
			got, err := inspectFile(t, path)
			check(t, err)
			if *got != c.want {
				t.Errorf("got %+v, want %+v", *got, c.want)
			}
		})
	}
	path := filepath.Join(dir, "snapshots")
	qemuImg(t, "create", "-q", "-f", "qcow2", path, "1M")
	qemuImg(t, "snapshot", "-c", "one", path)
	if got, err := inspectFile(t, path); err != nil || got.Snapshots != 1 {
		t.Errorf("Inspect of an image with a snapshot = %+v, %v; want 1 snapshot", got, err)
	}
}

// TestI5ExternalReferences: Inspect rejects every form of reference that would make QEMU open another file.
func TestI5ExternalReferences(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	check(t, os.WriteFile(in("secret"), make([]byte, 1<<20), 0o600))
	qemuImg(t, "create", "-q", "-f", "qcow2", "-b", in("secret"), "-F", "raw", in("backing"))
	qemuImg(t, "create", "-q", "-f", "qcow2", "-u", "-b", "json:{\"driver\":\"file\",\"filename\":\"/etc/shadow\"}", "-F", "raw", in("json"),
		"1M")
	qemuImg(t, "create", "-q", "-f", "qcow2", "-o", "data_file="+in("data")+",data_file_raw=on", in("external"), "1M")
	qemuImg(t, "create", "-q", "-f", "qcow2", "-o", "compat=0.10", "-u", "-b", "nbd://127.0.0.1:1/x", "-F", "raw", in("v2"), "1M")
	for name, word := range map[string]string{"backing": "backing file", "json": "backing file", "external": "external data file",
		"v2": "backing file"} {
		_, err := inspectFile(t, in(name))
		wantRefused(t, err, word)
	}
	// An incomplete reference is rejected, too.
	data, err := os.ReadFile(in("backing"))
	check(t, err)
	clear(data[8:20])
	_, err = Inspect(bytes.NewReader(data), int64(len(data)))
	wantRefused(t, err, "format of a backing file")
	data, err = os.ReadFile(in("external"))
	check(t, err)
	binary.BigEndian.PutUint64(data[72:], 0)
	_, err = Inspect(bytes.NewReader(data), int64(len(data)))
	wantRefused(t, err, "external data file")
}

func TestInspectRefusesEncryption(t *testing.T) {
	path := filepath.Join(t.TempDir(), "luks")
	create := []string{"create", "-q", "-f", "qcow2", "--object", "secret,id=s,data=abc123", "-o",
		"encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10", path, "1M"}
	for range 50 { // it measures how fast it derives keys, and gives up where its clock does not move meanwhile
		out, err := exec.Command("qemu-img", create...).CombinedOutput()
		if err == nil {
			break
		}
		if !strings.Contains(string(out), "accurate CPU usage") {
			t.Fatalf("qemu-img: %v\n%s", err, out)
		}
	}
	_, err := inspectFile(t, path)
	wantRefused(t, err, "LUKS")
	data, err := os.ReadFile(path)
	check(t, err)
	binary.BigEndian.PutUint32(data[32:], 0)
	_, err = Inspect(bytes.NewReader(data), int64(len(data)))
	wantRefused(t, err, "LUKS")
}

func TestInspectRefusesBadFields(t *testing.T) {
	path := filepath.Join(t.TempDir(), "base")
	qemuImg(t, "create", "-q", "-f", "qcow2", path, "1G")
	good, err := os.ReadFile(path)
	check(t, err)
	put32, put64 := binary.BigEndian.PutUint32, binary.BigEndian.PutUint64
	for name, c := range map[string]struct {
		change func(b []byte)
		words  []string
	}{
		"magic":              {func(b []byte) { b[0] = 'X' }, []string{"magic"}},
		"version 1":          {func(b []byte) { put32(b[4:], 1) }, []string{"version 1"}},
		"version 4":          {func(b []byte) { put32(b[4:], 4) }, []string{"version 4"}},
		"cluster bits 8":     {func(b []byte) { put32(b[20:], 8) }, []string{"cluster_bits is 8"}},
		"cluster bits 63":    {func(b []byte) { put32(b[20:], 63) }, []string{"cluster_bits is 63"}},
		"no size":            {func(b []byte) { put64(b[24:], 0) }, []string{"size is 0"}},
		"vast size":          {func(b []byte) { put64(b[24:], 1<<63) }, []string{"size is"}},
		"short L1":           {func(b []byte) { put64(b[24:], 1<<40) }, []string{"l1_size is 2", "2048"}},
		"large L1":           {func(b []byte) { put32(b[36:], 1<<32-1) }, []string{"l1_size is 4294967295", "4194304"}},
		"L1 at 0":            {func(b []byte) { put64(b[40:], 0) }, []string{"l1_table_offset"}},
		"L1 not aligned":     {func(b []byte) { put64(b[40:], 0x30001) }, []string{"l1_table_offset"}},
		"L1 outside":         {func(b []byte) { put64(b[40:], 0x40000) }, []string{"l1_table_offset", "cut off"}},
		"L1 wraps around":    {func(b []byte) { put64(b[40:], 1<<64-1<<16) }, []string{"l1_table_offset"}},
		"large refcounts":    {func(b []byte) { put32(b[56:], 129) }, []string{"refcount_table_clusters is 129", "128"}},
		"huge refcounts":     {func(b []byte) { put32(b[56:], 1<<32-1) }, []string{"refcount_table_clusters"}},
		"no refcounts":       {func(b []byte) { put32(b[56:], 0) }, []string{"refcount_table_clusters is 0"}},
		"refcounts outside":  {func(b []byte) { put64(b[48:], 0x7fff0000) }, []string{"refcount_table_offset", "cut off"}},
		"many snapshots":     {func(b []byte) { put32(b[60:], 65537) }, []string{"nb_snapshots is 65537"}},
		"snapshots outside":  {func(b []byte) { put32(b[60:], 1); put64(b[64:], 0x40000) }, []string{"snapshots_offset"}},
		"corrupt":            {func(b []byte) { put64(b[72:], featureCorrupt) }, []string{"corrupt"}},
		"data file":          {func(b []byte) { put64(b[72:], featureDataFile) }, []string{"external data file"}},
		"unknown feature":    {func(b []byte) { put64(b[72:], 1<<40) }, []string{"incompatible_features", "bit 40"}},
		"refcount order":     {func(b []byte) { put32(b[96:], 7) }, []string{"refcount_order is 7"}},
		"short header":       {func(b []byte) { put32(b[100:], 96) }, []string{"header_length is 96"}},
		"odd header":         {func(b []byte) { put32(b[100:], 105) }, []string{"header_length is 105"}},
		"long header":        {func(b []byte) { put32(b[100:], 1<<17) }, []string{"header_length"}},
		"AES":                {func(b []byte) { put32(b[32:], 1) }, []string{"AES"}},
		"unknown encryption": {func(b []byte) { put32(b[32:], 9) }, []string{"crypt_method is 9"}},
		"compression":        {func(b []byte) { b[104] = 7 }, []string{"compression_type is 7"}},
		"unsaid compression": {func(b []byte) { b[104] = 1 }, []string{"compression_type is 1"}},
		"backing size":       {func(b []byte) { put32(b[16:], 10) }, []string{"backing"}},
		"long extension":     {func(b []byte) { put32(b[116:], 1<<31) }, []string{"extension"}},
	} {
		t.Run(name, func(t *testing.T) {
			bad := bytes.Clone(good)
			c.change(bad)
			_, err := Inspect(bytes.NewReader(bad), int64(len(bad)))
			wantRefused(t, err, c.words...)
		})
	}
	for _, size := range []int{0, 3, 4, 71, 103, 200, 0x10000, 0x30000} {
		if _, err := Inspect(bytes.NewReader(good[:size]), int64(size)); !errdefs.IsInvalidArgument(err) {
			t.Errorf("Inspect of the first %d bytes: got error %v, want invalid argument", size, err)
		}
	}
	dirty := bytes.Clone(good)
	put64(dirty[72:], featureDirty)
	if got, err := Inspect(bytes.NewReader(dirty), int64(len(dirty))); err != nil || !got.Dirty {
		t.Errorf("Inspect of a dirty image = %+v, %v; want Dirty", got, err)
	}
}

// TestCreateOverlay: QEMU accepts the overlay, and would write the same bytes.
func TestCreateOverlay(t *testing.T) {
	dir := t.TempDir()
	for _, size := range []uint64{512, 1 << 20, 1 << 30, 3<<30 + 512, 1 << 44, 1 << 51} {
		path, theirs := filepath.Join(dir, "ours"), filepath.Join(dir, "theirs")
		check(t, CreateOverlay(t.Context(), path, size, Overlay{}))
		qemuImg(t, "check", "-q", "-f", "qcow2", path)
		var info struct {
			VirtualSize uint64 `json:"virtual-size"`
			ClusterSize uint64 `json:"cluster-size"`
			Backing     string `json:"backing-filename"`
		}
		check(t, json.Unmarshal(qemuImg(t, "info", "-f", "qcow2", "--output", "json", path), &info))
		if info.VirtualSize != size || info.ClusterSize != 1<<16 || info.Backing != "" {
			t.Errorf("qemu-img info = %+v, want %d bytes in clusters of 64 KiB without a backing file", info, size)
		}
		if got, err := inspectFile(t, path); err != nil || got.VirtualSize != size || got.Version != 3 {
			t.Errorf("Inspect = %+v, %v; want version 3 and %d bytes", got, err, size)
		}
		if size <= 1<<30 {
			qemuImg(t, "create", "-q", "-f", "qcow2", theirs, itoa(size))
			want, err := os.ReadFile(theirs)
			check(t, err)
			clear(want[headerCompression : headerCompression+8+384]) // the table of feature names, for people
			got, err := os.ReadFile(path)
			check(t, err)
			if !bytes.Equal(got, want) {
				t.Errorf("overlay of %d bytes differs from qemu-img's", size)
			}
			check(t, os.Remove(theirs))
		}
		stat, err := os.Stat(path)
		check(t, err)
		if stat.Mode() != 0o600 {
			t.Errorf("mode: got %v, want 0600", stat.Mode())
		}
		check(t, os.Remove(path))
	}
	for _, size := range []uint64{0, 511, 1<<51 + 512, 1 << 63} {
		wantRefused(t, CreateOverlay(t.Context(), filepath.Join(dir, "bad"), size, Overlay{}), "bad")
	}
}

func itoa(n uint64) string { b, _ := json.Marshal(n); return string(b) }

// TestOverlayReadsItsBase: QEMU reads an overlay that names no file over the base given as a block node.
func TestOverlayReadsItsBase(t *testing.T) {
	dir := t.TempDir()
	base, overlay := filepath.Join(dir, "base"), filepath.Join(dir, "overlay")
	// A raw disk into which a guest wrote a qcow2 header stays raw (fault I5).
	hostile := append([]byte(Magic), bytes.Repeat([]byte{0xab}, 1<<20-4)...)
	check(t, os.WriteFile(base, hostile, 0o400))
	check(t, CreateOverlay(t.Context(), overlay, 4<<20, Overlay{Mode: 0o640}))
	image := "json:" + `{"driver":"qcow2","file":{"driver":"file","filename":"` + overlay + `"},` +
		`"backing":{"driver":"raw","read-only":true,"file":{"driver":"file","filename":"` + base + `"}}}`
	run := func(command string) {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), "qemu-io", "-c", command, image).CombinedOutput()
		if err != nil || strings.Contains(string(out), "verification failed") || strings.Contains(string(out), "error") {
			t.Fatalf("qemu-io %q: %v\n%s", command, err, out)
		}
	}
	run("read -P 0xab 4096 1044480")
	run("read -P 0 1048576 3145728")
	run("write -P 0xcd 65536 4096")
	run("read -P 0xcd 65536 4096")
	run("read -P 0xab 69632 4096")
	qemuImg(t, "check", "-q", "-f", "qcow2", overlay)
	if got, err := os.ReadFile(base); err != nil || !bytes.Equal(got, hostile) {
		t.Error("the base was written to")
	}
}

// TestV4OverlayIsWholeOrAbsent: an interrupted CreateOverlay leaves no file at path, and the next attempt succeeds.
func TestV4OverlayIsWholeOrAbsent(t *testing.T) {
	failpoint.Needed(t)
	path := filepath.Join(t.TempDir(), "root.qcow2")
	for _, point := range []string{"qcow2.overlay.write", "qcow2.overlay.rename"} {
		check(t, failpoint.Arm(point, "error(power loss)"))
		err := CreateOverlay(t.Context(), path, 1<<20, Overlay{})
		check(t, failpoint.Arm(point, ""))
		if err == nil {
			t.Fatalf("%s: CreateOverlay succeeded, want an error", point)
		}
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: Lstat of the overlay: got error %v, want not exist", point, err)
		}
	}
	// A killed process leaves an incomplete file beside path.
	check(t, os.WriteFile(path+".new", []byte("half"), 0o600))
	check(t, CreateOverlay(t.Context(), path, 1<<20, Overlay{}))
	before, err := os.ReadFile(path)
	check(t, err)
	if err := CreateOverlay(t.Context(), path, 1<<21, Overlay{}); !errdefs.IsAlreadyExists(err) {
		t.Errorf("CreateOverlay over an existing file: got error %v, want already exists", err)
	}
	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(before, after) {
		t.Error("CreateOverlay changed an existing file")
	}
	entries, err := os.ReadDir(filepath.Dir(path))
	check(t, err)
	if len(entries) != 1 {
		t.Errorf("files beside the overlay: got %v, want none", entries)
	}
}

func FuzzInspect(f *testing.F) {
	for _, size := range []uint64{512, 1 << 30, 1 << 40} {
		path := filepath.Join(f.TempDir(), "seed")
		check(f, CreateOverlay(f.Context(), path, size, Overlay{ClusterBits: 12}))
		data, err := os.ReadFile(path)
		check(f, err)
		f.Add(data)
		f.Add(data[:100])
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		info, err := Inspect(bytes.NewReader(data), int64(len(data)))
		if err != nil {
			if !errdefs.IsInvalidArgument(err) {
				t.Fatalf("Inspect returned an error of the wrong class: %v", err)
			}
			return
		}
		if info.VirtualSize == 0 || info.ClusterSize < 512 || info.ClusterSize > 2<<20 || len(data) < headerV2 {
			t.Fatalf("Inspect accepted an invalid image: %+v", info)
		}
	})
}
