package boot

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

// plainUEFI is Debian's descriptor of OVMF without Secure Boot, with DIR in place of the firmware's directory.
const plainUEFI = `{"interface-types": ["uefi"], "mapping": {"device": "flash", "executable": {"filename": "DIR/code.fd", "format": "raw"},
	"nvram-template": {"filename": "DIR/vars.fd", "format": "raw"}},
	"targets": [{"architecture": "x86_64", "machines": ["pc-i440fx-*", "pc-q35-*"]}], "features": ["acpi-s3", "verbose-dynamic"], "tags": []}`

// TestFind: Find chooses the first suitable descriptor, and says what to install if there is none.
func TestFind(t *testing.T) {
	change := func(from, to string) string { return strings.Replace(plainUEFI, from, to, 1) }
	for name, test := range map[string]struct {
		system, admin map[string]string // descriptors by file name
		code          string            // "" means that there is no firmware
	}{
		"nothing":          {nil, nil, ""},
		"plain":            {map[string]string{"60.json": plainUEFI}, nil, "code.fd"},
		"split":            {map[string]string{"60.json": change(`"device": "flash"`, `"device": "flash", "mode": "split"`)}, nil, "code.fd"},
		"first by name":    {map[string]string{"60.json": plainUEFI, "50.json": change("code.fd", "first.fd")}, nil, "first.fd"},
		"both directories": {map[string]string{"60.json": plainUEFI}, map[string]string{"50.json": change("code.fd", "first.fd")}, "first.fd"},
		"replaced":         {map[string]string{"60.json": plainUEFI}, map[string]string{"60.json": change("code.fd", "first.fd")}, "first.fd"},
		"hidden":           {map[string]string{"60.json": plainUEFI}, map[string]string{"60.json": ""}, ""},
		"not JSON":         {map[string]string{"50.json": "{", "60.json": plainUEFI}, nil, "code.fd"},
		"only not JSON":    {map[string]string{"50.json": "{"}, nil, ""},
		"no descriptor":    {map[string]string{"60.json.old": plainUEFI}, nil, ""},
		"BIOS":             {map[string]string{"60.json": change(`"uefi"`, `"bios"`)}, nil, ""},
		"memory":           {map[string]string{"60.json": change("flash", "memory")}, nil, ""},
		"stateless":        {map[string]string{"60.json": change(`"device": "flash"`, `"device": "flash", "mode": "stateless"`)}, nil, ""},
		"qcow2":            {map[string]string{"60.json": change("raw", "qcow2")}, nil, ""},
		"Secure Boot":      {map[string]string{"60.json": change("acpi-s3", "secure-boot")}, nil, ""},
		"SMM":              {map[string]string{"60.json": change("acpi-s3", "requires-smm")}, nil, ""},
		"other processor":  {map[string]string{"60.json": change("x86_64", "aarch64")}, nil, ""},
		"other machine":    {map[string]string{"60.json": change("pc-q35-*", "microvm")}, nil, ""},
		"removed":          {map[string]string{"60.json": change("code.fd", "removed.fd")}, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			write := func(path, content string) {
				if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			for _, file := range []string{"code.fd", "first.fd", "vars.fd"} {
				write(filepath.Join(dir, file), file)
			}
			dirs := []string{t.TempDir(), t.TempDir(), filepath.Join(dir, "missing"), filepath.Join(dir, "code.fd")} // the last is no directory
			for i, files := range []map[string]string{test.system, test.admin} {
				for file, text := range files {
					write(filepath.Join(dirs[i], file), strings.ReplaceAll(text, "DIR", dir))
				}
			}
			got, err := find(dirs)
			if test.code == "" {
				if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "install the package ovmf") {
					t.Errorf("find = %+v, %v; want ErrFailedPrecondition and the name of a package", got, err)
				}
				return
			}
			if want := (UEFI{filepath.Join(dir, test.code), filepath.Join(dir, "vars.fd")}); err != nil || got != want {
				t.Errorf("find = %+v, %v; want %+v", got, err, want)
			}
		})
	}
}
