package cloudinit

import (
	"bytes"
	"encoding/base64"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// writtenFiles returns the decoded write_files in a user-data.
func writtenFiles(t *testing.T, userData []byte) map[string]string {
	t.Helper()
	var doc struct {
		WriteFiles []struct{ Path, Content, Encoding string } `json:"write_files"`
	}
	if err := yaml.Unmarshal(userData, &doc); err != nil {
		t.Fatalf("user-data is not YAML: %v:\n%s", err, userData)
	}
	files := map[string]string{}
	for _, f := range doc.WriteFiles {
		if f.Encoding == "b64" {
			data, err := base64.StdEncoding.DecodeString(f.Content)
			if err != nil {
				t.Fatal(err)
			}
			f.Content = string(data)
		}
		files[f.Path] = f.Content
	}
	return files
}

// FuzzEnvironment: a shell that sources the environment file gets the pod's value, whatever characters it has.
func FuzzEnvironment(f *testing.F) {
	for _, s := range []string{"", "plain", "a b", "it's", `"`, `\`, `\\'`, "$HOME", "`id`", "$(id)", "a\nb", "\n", "'\n'", "#", "~", "!x",
		"*", "\t", "\xff\xfe", "ä\u2028", "\r", "a=b", "-n", "\x1b[0m", "€\ufeff", "{{x}}", "# x: [", "- a"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, value string) {
		if strings.Contains(value, "\x00") {
			return // refused: TestHostileInput
		}
		in := base(t, nil)
		in.Env = []EnvVar{{"BEFORE", "1"}, {"VALUE", value}, {"AFTER", "2"}}
		b := &builder{in: in, budget: maxTotal, count: maxFiles}
		userData, err := b.userData(nil)
		if err != nil {
			t.Fatal(err)
		}
		files := writtenFiles(t, userData)
		file := filepath.Join(t.TempDir(), "environment")
		if err := os.WriteFile(file, []byte(files[environmentPath]), 0o600); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("sh", "-c", `set -ea; . "$0"; exec env -0`, file)
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C"}
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("source the file for value %q: %v", value, err)
		}
		for _, want := range []string{"BEFORE=1", "AFTER=2", "VALUE=" + value} {
			if !bytes.Contains(append([]byte{0}, out...), []byte("\x00"+want+"\x00")) {
				t.Fatalf("the shell's environment %q lacks %q; the file is\n%s", out, want, files[environmentPath])
			}
		}
		if got := unquoteSystemd(t, files[environmentDPath])["VALUE"]; got != value {
			t.Fatalf("the value in environment.d(5) is %q, want %q; the file is\n%s", got, value, files[environmentDPath])
		}
	})
}

// unquoteSystemd parses the output of quoteSystemd like environment.d(5) in systemd 252: double quotes with a backslash
// before \ " ` and $, then $$ for $. systemd's own generator read the golden file correctly.
func unquoteSystemd(t *testing.T, text string) map[string]string {
	t.Helper()
	values := map[string]string{}
	for text != "" {
		name, rest, ok := strings.Cut(text, "=")
		if !ok {
			t.Fatalf("no = in %q", text)
		}
		var value strings.Builder
		quoted := strings.HasPrefix(rest, `"`)
		rest = strings.TrimPrefix(rest, `"`)
	read:
		for i := 0; ; i++ {
			if i == len(rest) {
				t.Fatalf("no line end in %q", text)
			}
			switch c := rest[i]; {
			case quoted && c == '\\' && strings.IndexByte("\\\"`$", rest[i+1]) >= 0:
				i++
				value.WriteByte(rest[i])
			case quoted && c == '"':
				rest, quoted = rest[i+1:], false
				i = -1
			case !quoted && c == '\n':
				text = rest[i+1:]
				break read
			default:
				value.WriteByte(c)
			}
		}
		values[name] = strings.ReplaceAll(value.String(), "$$", "$")
	}
	return values
}

// FuzzFiles: a file in a volume reaches the guest unchanged, whatever its content.
func FuzzFiles(f *testing.F) {
	for _, s := range []string{"", "x", "a: b\n", "\t- x\n", "\x00", "\xff", "---\n...\n", "\u2028\u0085\ufeff", "trailing \n\n", "  leading",
		"#cloud-config\n", "'\"", "\r\n", "=", "0777", "yes", "~"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, content string) {
		in := base(t, nil)
		in.Mounts = []Mount{{HostPath: volume(t, "configmap", "c", map[string]string{"f": content}), ContainerPath: "/etc/x"}}
		b := &builder{in: in, budget: maxTotal, count: maxFiles}
		userData, err := b.userData(nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := writtenFiles(t, userData); got["/etc/x/f"] != content || len(got) != 1 {
			t.Fatalf("files = %q, want only /etc/x/f with %q", got, content)
		}
	})
}

// TestScriptsAreShell: a POSIX shell accepts the syntax of all scripts.
func TestScriptsAreShell(t *testing.T) {
	in := base(t, nil)
	in.Agent = true
	in.Devices = []Device{{"disk0", "/dev/it's"}}
	b := &builder{in: in}
	share := []Mount{{ContainerPath: "/it's;date", Tag: ShareTag(0)}}
	for name, script := range map[string]string{"links": b.linkScript(), "mounts": b.mountScript(share), "vendor": b.vendorData(share)} {
		cmd := exec.Command("sh", "-n")
		cmd.Stdin = strings.NewReader(script)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("sh -n %s: %v, %s", name, err, out)
		}
	}
}

// TestLinkScript runs the script with a fake /sys/block.
func TestLinkScript(t *testing.T) {
	dir := t.TempDir()
	for file, content := range map[string]string{
		"sys/vda/serial":           "root",
		"sys/vdb/serial":           "disk0\n",
		"sys/sda/device/vpd_pg80":  "\x00\x80\x00\x05disk1",
		"dev/existing":             "",
		"sys/vdc/serial":           "disk2",
		"sys/loop0/queue/nothing":  "",
		"sys/sdb/device/vpd_pg80":  "\x00\x80\x00\x08disk3  \x00",
		"dev/disk by/id/something": "",
	} {
		at := filepath.Join(dir, file)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	in := base(t, nil)
	in.Devices = []Device{
		{"disk0", dir + "/dev/testpvc"},
		{"disk1", dir + "/dev/deep/it's $HOME"},
		{"disk2", dir + "/dev/existing"},
		{"disk3", dir + "/dev/disk by/three"},
		{"disk9", dir + "/dev/nine"},
	}
	b := &builder{in: in}
	script := strings.ReplaceAll(b.linkScript(), "/sys/block/", dir+"/sys/")
	for range 2 { // at every boot
		cmd := exec.Command("sh", "-eu")
		cmd.Stdin = strings.NewReader(script)
		if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
			t.Fatalf("link script: %v, output %q", err, out)
		}
	}
	for link, want := range map[string]string{"testpvc": "/dev/vdb", "deep/it's $HOME": "/dev/sda", "disk by/three": "/dev/sdb"} {
		if got, err := os.Readlink(filepath.Join(dir, "dev", link)); err != nil || got != want {
			t.Errorf("Readlink(%s) = %q, %v; want %q", link, got, err, want)
		}
	}
	if info, err := os.Lstat(filepath.Join(dir, "dev/existing")); err != nil || !info.Mode().IsRegular() {
		t.Errorf("the existing file was replaced: %v", err)
	}
	if _, err := os.Lstat(filepath.Join(dir, "dev/nine")); err == nil {
		t.Error("there is a link to a missing disk")
	}
}

// TestAgentIsStarted runs the vendor-data with fake system directories. It finds the disk by its content and mounts it,
// and a shell or systemd starts the agent again when it ends.
func TestAgentIsStarted(t *testing.T) {
	for _, systemd := range []bool{false, true} {
		dir := t.TempDir()
		bin := filepath.Join(dir, "bin")
		disk := append(make([]byte, 32808), "TRIPODAGENT     "...)
		for file, content := range map[string]string{
			"sys/vda/size": "", "sys/vdb/size": "", "sys/vdc/size": "",
			"dev/vda": "short", "dev/vdb": string(disk), "dev/vdc": strings.Repeat("\x00", 40000),
			"proc/mounts":     "/dev/vda / ext4 rw 0 0\n",
			"bin/mount":       "#!/bin/sh\necho mount \"$@\" >>" + dir + "/log\n",
			"bin/systemd-run": "#!/bin/sh\necho systemd-run \"$@\" >>" + dir + "/log\n",
			// The agent records its start. At the second start it also kills the loop that starts it.
			"run/tripod-agent/tripod-agent": "#!/bin/sh\nif [ -e " + dir + "/once ]; then echo twice >>" + dir + "/done; kill $PPID; fi\n: >" + dir +
				"/once\n",
		} {
			at := filepath.Join(dir, file)
			if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(at, []byte(content), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if systemd {
			if err := os.MkdirAll(filepath.Join(dir, "run/systemd/system"), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		in := base(t, nil)
		in.Agent = true
		b := &builder{in: in}
		script := strings.NewReplacer("/dev/null", "/dev/null", "/sys/block/", dir+"/sys/", "/run/", dir+"/run/", "/dev/", dir+"/dev/", "/proc/",
			dir+"/proc/").Replace(b.vendorData(nil))
		cmd := exec.Command("sh", "-c", script+"\n")
		cmd.Env = []string{"PATH=" + bin + ":" + os.Getenv("PATH")}
		if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
			t.Fatalf("vendor-data: %v, output %q", err, out)
		}
		want := "mount -t iso9660 -o ro " + dir + "/dev/vdb " + dir + "/run/tripod-agent\n"
		if systemd {
			want += "systemd-run --no-block --unit=tripod-agent -p Restart=always -p RestartSec=1 " + dir + "/run/tripod-agent/tripod-agent\n"
		} else {
			awaitFile(t, filepath.Join(dir, "done"))
		}
		if log, err := os.ReadFile(filepath.Join(dir, "log")); err != nil || string(log) != want {
			t.Errorf("commands (systemd: %t) = %q, %v; want %q", systemd, log, err, want)
		}
	}
}

// awaitFile waits until a file exists and is not empty.
func awaitFile(t *testing.T, path string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sh", "-c",
		`i=0; while [ ! -s "$0" ] && [ $i -lt 600 ]; do i=$((i+1)); sleep 0.1; done; [ -s "$0" ]`, path)
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s did not appear within a minute: %v", path, err)
	}
}
