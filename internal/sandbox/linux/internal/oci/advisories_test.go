package oci

import (
	"compress/gzip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/Masterminds/semver/v3"
)

// november2025 are the advisories of November 2025, which runc fixed in three release lines.
var november2025 = []string{"CVE-2025-31133", "CVE-2025-52565", "CVE-2025-52881"}

// TestAdvisories: the finding for version lines that runtimes print.
func TestAdvisories(t *testing.T) {
	debian := &debianPackage{version: "1.1.5+ds1-1+deb12u1", named: []string{"CVE-2024-21626"}}
	for line, want := range map[string]struct {
		pkg                      *debianPackage
		ok                       bool
		open, patched, unreached []string
		without                  []string
	}{
		"runc version 1.1.5+ds1": {pkg: debian, open: append([]string{"CVE-2024-45310"}, november2025...), patched: []string{"CVE-2024-21626"},
			unreached: []string{"CVE-2026-41579", "CVE-2026-119101"}, without: []string{"CVE-2023-28642"}},
		"runc version 1.1.4": {open: append([]string{"CVE-2023-27561", "CVE-2024-45310"}, november2025...),
			unreached: []string{"CVE-2024-21626", "CVE-2023-28642"}},
		"runc version 1.1.14":     {open: november2025, without: []string{"CVE-2024-45310", "CVE-2024-21626"}},
		"runc version 1.2.7":      {open: november2025, without: []string{"CVE-2024-45310"}},
		"runc version 1.2.8":      {ok: true, unreached: []string{"CVE-2026-41579"}, without: november2025},
		"runc version 1.3.2":      {open: november2025},
		"runc version 1.3.3":      {ok: true, without: november2025},
		"runc version 1.4.0-rc.2": {open: november2025},
		"runc version 1.4.0":      {ok: true, without: november2025},
		"runc version 1.3.7":      {ok: true, without: append([]string{"CVE-2026-41579", "CVE-2026-119101"}, november2025...)},
		"runc version 1.5.3":      {ok: true, without: []string{"CVE-"}},
		"runc version 1.6.0":      {ok: true, without: []string{"CVE-"}},
		"runc version 1.0.0-rc92": {open: append([]string{"CVE-2019-5736", "CVE-2021-30465"}, november2025...),
			without: []string{"CVE-2024-21626"}},
		"crun version 1.8.1": {ok: true, unreached: []string{"CVE-2025-24965", "CVE-2026-47766", "CVE-2026-88265", "CVE-2026-115520"},
			without: append([]string{"CVE-2026-30892"}, november2025...)},
		"crun version 1.20":    {ok: true, unreached: []string{"CVE-2026-30892"}, without: []string{"CVE-2025-24965"}},
		"crun version 0.10.4":  {open: []string{"CVE-2019-18837"}},
		"crun version 1.30":    {ok: true, unreached: []string{"CVE-2026-115520"}, without: []string{"CVE-2026-88264"}},
		"crun version nightly": {},
		"youki version 0.5.7":  {},
	} {
		f := advisoryFinding(line, want.pkg)
		if f.OK != want.ok || f.Required || !f.OK && f.Remedy == "" {
			t.Errorf("advisoryFinding(%q) = %+v, want OK %v, not required, and a remedy unless OK", line, f, want.ok)
		}
		parts := map[string]string{}
		for part := range strings.SplitSeq(f.Detail, "; ") {
			what, list, _ := strings.Cut(part, ": ")
			parts[what] = list
		}
		for what, cves := range map[string][]string{"open": want.open, "fixed by the package, according to its changelog": want.patched,
			"out of reach of containers": want.unreached} {
			for _, cve := range cves {
				if !regexp.MustCompile(cve + `\b`).MatchString(parts[what]) {
					t.Errorf("advisoryFinding(%q): detail %q, want %s listed as %s", line, f.Detail, cve, what)
				}
			}
		}
		if want.open == nil && parts["open"] != "" {
			t.Errorf("advisoryFinding(%q): open vulnerabilities %s, want none", line, parts["open"])
		}
		for _, cve := range want.without {
			if strings.Contains(f.Detail, cve) {
				t.Errorf("advisoryFinding(%q): detail %q, want no %s", line, f.Detail, cve)
			}
		}
	}
}

// TestAdvisoryTable: every version in the table is valid, and each list is sorted.
func TestAdvisoryTable(t *testing.T) {
	for name, list := range advisories {
		for _, a := range list {
			if cveName().FindString(a.cve) != a.cve {
				t.Errorf("%s: %q is not a CVE ID", name, a.cve)
			}
			versions := a.fixed
			if a.since != "" {
				versions = append([]string{a.since}, versions...)
			}
			parsed := make([]*semver.Version, len(versions))
			for i, v := range versions {
				parsed[i] = semver.MustParse(v)
			}
			if !slices.IsSortedFunc(parsed, (*semver.Version).Compare) {
				t.Errorf("%s %s: versions %v, want ascending order", name, a.cve, versions)
			}
		}
	}
}

// TestPackageChangelog: a package's fixes are read from its changelog; without one they are unknown.
func TestPackageChangelog(t *testing.T) {
	file := filepath.Join(t.TempDir(), "changelog.Debian.gz")
	if named := changelogCVEs(file); named != nil {
		t.Errorf("CVEs without a changelog: got %v, want nil", named)
	}
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	z := gzip.NewWriter(f)
	_, err = z.Write([]byte("runc (1.1.5+ds1-1+deb12u2) bookworm-security\n\n  * CVE-2025-31133, CVE-2025-52565\n  * CVE-2025-31133: regression\n"))
	if err != nil || z.Close() != nil || f.Close() != nil {
		t.Fatal(err)
	}
	if named := changelogCVEs(file); !slices.Equal(named, []string{"CVE-2025-31133", "CVE-2025-52565"}) {
		t.Errorf("CVEs in the changelog: got %v, want CVE-2025-31133 and CVE-2025-52565", named)
	}
	if p := packageOf(t.Context(), file); p != nil {
		t.Errorf("packageOf a file that no package owns: got %+v, want nil", p)
	}
}
