package apparmor

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

// kernel is a fake securityfs with a fake apparmor_parser that loads into it, or does what the script says.
func kernel(t *testing.T, script string) (root, parser string) {
	t.Helper()
	root = t.TempDir()
	profiles := filepath.Join(root, profilesFile)
	if err := os.MkdirAll(filepath.Dir(profiles), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(profiles, []byte("docker-default (enforce)\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if script == "" {
		script = `[ "$*" = -Kr ] || exit 9; cat >"$ROOT/loaded"; name=$(sed -n 's/^profile \([^ ]*\) .*/\1/p' "$ROOT/loaded"); echo "$name (enforce)" >>"$ROOT/` + profilesFile + `"`
	}
	parser = filepath.Join(root, parserName)
	if err := os.WriteFile(parser, []byte("#!/bin/sh\nROOT="+root+"\n"+script+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return root, parser
}

func TestLoadDefault(t *testing.T) {
	root, parser := kernel(t, "")
	for range 2 { // the second daemon replaces the profile of the first
		if err := LoadDefault(t.Context(), root, parser); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]bool{DefaultProfile: true, "docker-default": true, "tripod": false, "tripod-default-2": false} {
		if got, err := Loaded(root, name); got != want || err != nil {
			t.Errorf("Loaded(%q) = %v, %v, want %v", name, got, err, want)
		}
	}
	text, err := os.ReadFile(filepath.Join(root, "loaded"))
	if err != nil {
		t.Fatal(err)
	}
	for _, rule := range []string{"profile tripod-default flags=", "deny mount,", "deny @{PROC}/sysrq-trigger rwklx,",
		"peer=tripod-default,"} {
		if !strings.Contains(string(text), rule) {
			t.Errorf("the profile has no %q:\n%s", rule, text)
		}
	}
}

func TestLoadDefaultFails(t *testing.T) {
	for what, c := range map[string]struct{ script, want string }{
		"a parser that fails":        {"echo 'AppArmor parser error: bad abi' >&2; exit 1", "bad abi"},
		"a parser without an effect": {"exit 0", "does not list"},
		"no securityfs":              {"rm -r $ROOT/sys", "cannot be listed"},
	} {
		root, parser := kernel(t, c.script)
		if err := LoadDefault(t.Context(), root, parser); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: LoadDefault = %v, want an error with %q", what, err, c.want)
		}
	}
}

func TestFindParser(t *testing.T) {
	_, parser := kernel(t, "")
	t.Setenv("PATH", filepath.Dir(parser))
	if got, err := FindParser(); got != parser || err != nil {
		t.Errorf("FindParser = %s, %v, want %s", got, err, parser)
	}
	t.Setenv("PATH", t.TempDir())
	if got, err := FindParser(); !isFile("/sbin/"+parserName) && !errdefs.IsNotFound(err) {
		t.Errorf("FindParser without the program = %s, %v, want ErrNotFound", got, err)
	}
}
