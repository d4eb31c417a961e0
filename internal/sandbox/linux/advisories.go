package linux

import (
	"bufio"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/Masterminds/semver/v3"
)

// advisory is a published vulnerability of an OCI runtime.
type advisory struct {
	cve string
	// since is the first version that has it; empty: all before the fix.
	since string
	// fixed are the first versions without it, one for each line of releases (major.minor) that has a fix, in order. Later lines
	// are without it, earlier ones have it. None: no release with the fix was known when this was written (November 2026).
	fixed []string
	// unreached says why no container of ours can use it; empty: one may.
	unreached string
}

const (
	noRestore   = "containers are neither checkpointed nor restored"
	noKrun      = "the handler krun is never asked for, and annotations of pods and images do not reach the runtime"
	realDev     = "an image whose /dev is not a directory is refused, and every container has a tmpfs of its own there"
	noInherited = "processes are given no inheritable capabilities"
)

// advisories are those of crun and runc, from their release notes and the advisories that these name
// (github.com/opencontainers/runc/releases, github.com/containers/crun/releases, both with /security/advisories), and from
// nvd.nist.gov for those older than 2020. crun's maintainers found crun not affected by CVE-2024-21626 (release 1.14.1) and by
// CVE-2025-31133, -52565 and -52881 (github.com/containers/crun/issues/1906). Fixes in release candidates of 1.0.0 count from 1.0.0.
var advisories = map[string][]advisory{
	"runc": {
		{cve: "CVE-2019-5736", fixed: []string{"1.0.0"}},
		{cve: "CVE-2019-16884", fixed: []string{"1.0.0"}},
		{cve: "CVE-2019-19921", fixed: []string{"1.0.0"}},
		{cve: "CVE-2021-30465", fixed: []string{"1.0.0"}},
		{cve: "CVE-2021-43784", fixed: []string{"1.0.3"}, unreached: "the runtime's configuration is made by tripod, and bounded"},
		{cve: "CVE-2022-29162", fixed: []string{"1.1.2"}, unreached: noInherited},
		{cve: "CVE-2023-25809", fixed: []string{"1.1.5"}, unreached: "it concerns a runtime that does not run as root"},
		{cve: "CVE-2023-27561", fixed: []string{"1.1.5"}},
		{cve: "CVE-2023-28642", fixed: []string{"1.1.5"}, unreached: "an image whose /proc is not a directory is refused"},
		{cve: "CVE-2024-21626", since: "1.0.0-rc93", fixed: []string{"1.1.12"}, unreached: "working directories below /proc are refused"},
		{cve: "CVE-2024-45310", fixed: []string{"1.1.14", "1.2.0-rc.3"}},
		{cve: "CVE-2025-31133", fixed: []string{"1.2.8", "1.3.3", "1.4.0-rc.3"}},
		{cve: "CVE-2025-52565", fixed: []string{"1.2.8", "1.3.3", "1.4.0-rc.3"}},
		{cve: "CVE-2025-52881", fixed: []string{"1.2.8", "1.3.3", "1.4.0-rc.3"}},
		{cve: "CVE-2026-41579", fixed: []string{"1.3.6", "1.4.3", "1.5.0-rc.3"}, unreached: realDev},
		{cve: "CVE-2026-119101", fixed: []string{"1.3.7", "1.4.4", "1.5.3", "1.6.0-rc.2"}, unreached: noRestore},
	},
	"crun": {
		{cve: "CVE-2019-18837", fixed: []string{"0.10.5"}},
		{cve: "CVE-2022-27650", fixed: []string{"1.4.4"}, unreached: noInherited},
		{cve: "CVE-2025-24965", fixed: []string{"1.20"}, unreached: noKrun},
		{cve: "CVE-2026-30892", since: "1.19", fixed: []string{"1.27"}, unreached: "programs are started by a process file, not by the option --user"},
		{cve: "CVE-2026-47766", fixed: []string{"1.28"}, unreached: realDev},
		{cve: "CVE-2026-84042", fixed: []string{"1.30"}, unreached: noKrun},
		{cve: "CVE-2026-88264", fixed: []string{"1.30"}, unreached: realDev},
		{cve: "CVE-2026-88265", fixed: []string{"1.30"}, unreached: realDev},
		{cve: "CVE-2026-115520", unreached: noRestore},
	},
}

// has reports whether a version of the runtime has the vulnerability.
func (a advisory) has(v *semver.Version) bool {
	if a.since != "" && v.LessThan(semver.MustParse(a.since)) {
		return false
	}
	for _, f := range a.fixed {
		fixed := semver.MustParse(f)
		if v.Major() == fixed.Major() && v.Minor() == fixed.Minor() {
			return v.LessThan(fixed)
		}
	}
	return len(a.fixed) == 0 || v.LessThan(semver.MustParse(a.fixed[len(a.fixed)-1]))
}

// versionLine is the first line of `crun --version` and `runc --version`: "runc version 1.1.5+ds1".
var versionLine = regexp.MustCompile(`^(crun|runc) version (\S+)`)

// parseVersion takes the first line of --version apart. ok is false for a runtime that the table does not have.
func parseVersion(line string) (name string, v *semver.Version, ok bool) {
	m := versionLine.FindStringSubmatch(line)
	if m == nil {
		return "", nil, false
	}
	v, err := semver.NewVersion(m[2])
	return m[1], v, err == nil
}

// debianPackage is the package that a program is from. named are the CVEs of its changelog, which are those that it has fixed beyond
// what its version number says; nil when there is no changelog.
type debianPackage struct {
	version string
	named   []string
}

// advisoryFinding holds a runtime against the table.
func advisoryFinding(line string, pkg *debianPackage) Finding {
	name, v, ok := parseVersion(line)
	if !ok {
		return Finding{Subject: "known vulnerabilities", Detail: fmt.Sprintf("the version in %q is not known: it may have vulnerabilities that are published", line),
			Remedy: "compare it with the security advisories of its maker"}
	}
	f := Finding{Subject: "vulnerabilities of " + name}
	var open, patched, unreached []string
	for _, a := range advisories[name] {
		switch {
		case !a.has(v):
		case pkg != nil && slices.Contains(pkg.named, a.cve):
			patched = append(patched, a.cve)
		case a.unreached != "":
			unreached = append(unreached, a.cve+" ("+a.unreached+")")
		default:
			open = append(open, a.cve)
		}
	}
	parts := []string{fmt.Sprintf("version %s has none of those that were known in November 2026", v.Original())}
	if len(open)+len(patched)+len(unreached) > 0 {
		parts = []string{"version " + v.Original()}
	}
	for _, list := range []struct {
		what string
		cves []string
	}{{"open", open}, {"fixed by the package, as its changelog says", patched}, {"out of reach of containers", unreached}} {
		if len(list.cves) > 0 {
			parts = append(parts, list.what+": "+strings.Join(list.cves, ", "))
		}
	}
	if pkg != nil {
		parts = append(parts, "Debian package "+pkg.version)
		if pkg.named == nil {
			parts = append(parts, "without a changelog: what it has fixed beyond its version is not known")
		}
	}
	f.OK, f.Detail = len(open) == 0, strings.Join(parts, "; ")
	f.Remedy = "install a release with the fixes; masked paths, read-only paths, dropped capabilities and seccomp do not hold these back, " +
		"but only who can make pods with volumes that containers share, or with images of his own, can use them"
	return f
}

// packageTime bounds the questions to dpkg.
const packageTime = 5 * time.Second

// packageOf asks dpkg which package a program is from; nil when it is from none, or there is no dpkg.
func packageOf(ctx context.Context, program string) *debianPackage {
	ctx, cancel := context.WithTimeout(ctx, packageTime)
	defer cancel()
	resolved, err := filepath.EvalSymlinks(program)
	if err != nil {
		return nil
	}
	// Packages older than the merge of /usr own the file by its older name.
	for _, path := range []string{resolved, strings.TrimPrefix(resolved, "/usr")} {
		owner, err := exec.CommandContext(ctx, "dpkg-query", "--search", path).Output()
		name, _, found := strings.Cut(string(owner), ":")
		if err != nil || !found || strings.ContainsAny(name, " ,\n/") {
			continue
		}
		version, err := exec.CommandContext(ctx, "dpkg-query", "--show", "--showformat", "${Version}", name).Output()
		if err != nil {
			continue
		}
		return &debianPackage{version: string(version), named: changelogCVEs(filepath.Join("/usr/share/doc", name, "changelog.Debian.gz"))}
	}
	return nil
}

// maxChangelog bounds what is read of a changelog, in bytes.
const maxChangelog = 16 << 20

var cveName = regexp.MustCompile(`CVE-\d{4}-\d{4,}`)

// changelogCVEs are the CVEs that a package's changelog names; nil when it cannot be read.
func changelogCVEs(file string) []string {
	f, err := os.Open(file)
	if err != nil {
		return nil
	}
	defer f.Close()
	unzipped, err := gzip.NewReader(bufio.NewReader(f))
	if err != nil {
		return nil
	}
	text, err := io.ReadAll(io.LimitReader(unzipped, maxChangelog))
	if err != nil {
		return nil
	}
	named := cveName.FindAllString(string(text), -1)
	slices.Sort(named)
	return append([]string{}, slices.Compact(named)...)
}
