package oci

import (
	"bufio"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/Masterminds/semver/v3"

	"github.com/tripod-run/tripod/internal/health"
	"github.com/tripod-run/tripod/internal/lazyregexp"
)

// advisory is a published vulnerability of an OCI runtime.
type advisory struct {
	cve string
	// since is the first affected version; "" means every version before the fix.
	since string
	// fixed lists, in order, the first fixed version of each release line (major.minor) that has a fix. Any other
	// release line is affected if it is older than the last entry. The list is empty if no release had a fix in
	// November 2026.
	fixed []string
	// unreached says why no container here can exploit the vulnerability; "" means that a container might be able to.
	unreached string
}

const (
	noRestore   = "containers are never checkpointed or restored"
	noKrun      = "the krun handler is never used, and annotations of pods and images do not reach the runtime"
	realDev     = "images whose /dev is not a directory are refused, and every container has its own tmpfs there"
	noInherited = "processes get no inheritable capabilities"
)

// advisories lists the published vulnerabilities of each runtime. Sources: release notes and security advisories
// (github.com/opencontainers/runc/releases, github.com/containers/crun/releases, both with /security/advisories), and
// nvd.nist.gov for the years before 2020. According to its maintainers, crun is not affected by CVE-2024-21626 (notes
// of release 1.14.1) or CVE-2025-31133, -52565 and -52881 (github.com/containers/crun/issues/1906). A fix in a release
// candidate of 1.0.0 counts as 1.0.0.
var advisories = map[string][]advisory{
	"runc": {
		{cve: "CVE-2019-5736", fixed: []string{"1.0.0"}},
		{cve: "CVE-2019-16884", fixed: []string{"1.0.0"}},
		{cve: "CVE-2019-19921", fixed: []string{"1.0.0"}},
		{cve: "CVE-2021-30465", fixed: []string{"1.0.0"}},
		{cve: "CVE-2021-43784", fixed: []string{"1.0.3"}, unreached: "tripod writes the runtime's configuration, within bounds"},
		{cve: "CVE-2022-29162", fixed: []string{"1.1.2"}, unreached: noInherited},
		{cve: "CVE-2023-25809", fixed: []string{"1.1.5"}, unreached: "it affects only rootless runtimes"},
		{cve: "CVE-2023-27561", fixed: []string{"1.1.5"}},
		{cve: "CVE-2023-28642", fixed: []string{"1.1.5"}, unreached: "images whose /proc is not a directory are refused"},
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
		{cve: "CVE-2026-30892", since: "1.19", fixed: []string{"1.27"},
			unreached: "programs are started by a process file, not by the option --user"},
		{cve: "CVE-2026-47766", fixed: []string{"1.28"}, unreached: realDev},
		{cve: "CVE-2026-84042", fixed: []string{"1.30"}, unreached: noKrun},
		{cve: "CVE-2026-88264", fixed: []string{"1.30"}, unreached: realDev},
		{cve: "CVE-2026-88265", fixed: []string{"1.30"}, unreached: realDev},
		{cve: "CVE-2026-115520", unreached: noRestore},
	},
}

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

// versionLine matches the first line of `crun --version` and `runc --version`: "runc version 1.1.5+ds1".
var versionLine = lazyregexp.New(`^(crun|runc) version (\S+)`)

// parseVersion parses the first line of --version. The last result is false for an unknown runtime or version.
func parseVersion(line string) (name string, v *semver.Version, ok bool) {
	m := versionLine().FindStringSubmatch(line)
	if m == nil {
		return "", nil, false
	}
	v, err := semver.NewVersion(m[2])
	return m[1], v, err == nil
}

// debianPackage is the package that owns a program. A CVE counts as fixed if the package's changelog mentions it,
// whatever the package's version number is. The mentioned CVEs are in the field "named", which is nil without a
// changelog.
type debianPackage struct {
	version string
	named   []string
}

// advisoryFinding reports which advisories apply to a runtime's version.
func advisoryFinding(line string, pkg *debianPackage) health.Finding {
	name, v, ok := parseVersion(line)
	if !ok {
		return health.Finding{Subject: "known vulnerabilities",
			Detail: fmt.Sprintf("unknown version %q: it may have published vulnerabilities", line),
			Remedy: "check the security advisories of its maintainers"}
	}
	f := health.Finding{Subject: "vulnerabilities of " + name}
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
	parts := []string{fmt.Sprintf("version %s has none of those known in November 2026", v.Original())}
	if len(open)+len(patched)+len(unreached) > 0 {
		parts = []string{"version " + v.Original()}
	}
	for _, list := range []struct {
		what string
		cves []string
	}{{"open", open}, {"fixed by the package, according to its changelog", patched}, {"out of reach of containers", unreached}} {
		if len(list.cves) > 0 {
			parts = append(parts, list.what+": "+strings.Join(list.cves, ", "))
		}
	}
	if pkg != nil {
		parts = append(parts, "Debian package "+pkg.version)
		if pkg.named == nil {
			parts = append(parts, "no changelog: backported fixes are unknown")
		}
	}
	f.OK, f.Detail = len(open) == 0, strings.Join(parts, "; ")
	f.Remedy = "install a release with the fixes; masked paths, read-only paths, dropped capabilities and seccomp do not stop these, " +
		"but only users who can create pods with shared volumes or their own images can exploit them"
	return f
}

// packageTime limits the queries to dpkg.
const packageTime = 5 * time.Second

// packageOf asks dpkg which package owns a program. It returns nil if no package owns it, or if dpkg is missing.
func packageOf(ctx context.Context, program string) *debianPackage {
	ctx, cancel := context.WithTimeout(ctx, packageTime)
	defer cancel()
	resolved, err := filepath.EvalSymlinks(program)
	if err != nil {
		return nil
	}
	// Packages from before the /usr merge own the file under its old path.
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

// maxChangelog limits how many bytes of a changelog are read, after decompression.
const maxChangelog = 16 << 20

var cveName = lazyregexp.New(`CVE-\d{4}-\d{4,}`)

// changelogCVEs lists the CVEs in a package's changelog. It returns nil if the changelog cannot be read.
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
	named := cveName().FindAllString(string(text), -1)
	slices.Sort(named)
	return append([]string{}, slices.Compact(named)...)
}
