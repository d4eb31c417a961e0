package cloudinit

import (
	"fmt"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/lazyregexp"
)

// The container's environment is in two files in the guest. Shells can source the first file, which has the same path
// as in Virtlet. systemd's user sessions read the second file.
const (
	environmentPath  = "/etc/cloud/environment"
	environmentDPath = "/etc/environment.d/90-tripod.conf"
)

var (
	variable = lazyregexp.New(`^[A-Za-z_][A-Za-z0-9_]*$`)
	// plainValue matches values that need no quotes in a shell or in systemd.
	plainValue = lazyregexp.New(`^[-+./:@%^,_A-Za-z0-9]*$`)
)

// environment returns the container's environment in two forms: as a file that a shell can source, and as a file for
// environment.d(5). If a variable is given twice, the last value counts. Names with a line break, NUL or '=' are
// refused, and so are values with NUL. Names that a shell does not allow are left out, with a warning.
func (b *builder) environment() (shell, systemd string, err error) {
	last := map[string]int{}
	for i, e := range b.in.Env {
		if e.Name == "" || strings.ContainsFunc(e.Name, isControl) || strings.Contains(e.Name, "=") {
			return "", "", fmt.Errorf("environment: %q is not the name of a variable: %w", e.Name, errdefs.ErrInvalidArgument)
		}
		if strings.Contains(e.Value, "\x00") {
			return "", "", fmt.Errorf("environment: the value of %s has a NUL byte: %w", e.Name, errdefs.ErrInvalidArgument)
		}
		last[e.Name] = i
	}
	var forShell, forSystemd strings.Builder
	for i, e := range b.in.Env {
		switch {
		case last[e.Name] != i:
		case !variable().MatchString(e.Name):
			b.warn("environment variable %q is left out: shells do not allow that name", e.Name)
		default:
			forShell.WriteString(e.Name + "=" + quoteShell(e.Value) + "\n")
			if e.Value != "" { // systemd does not allow empty values
				forSystemd.WriteString(e.Name + "=" + quoteSystemd(e.Value) + "\n")
			}
		}
	}
	return forShell.String(), forSystemd.String(), nil
}

// quoteShell quotes s for a POSIX shell, if necessary.
func quoteShell(s string) string {
	if plainValue().MatchString(s) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// quoteSystemd quotes s for environment.d(5), if necessary: in double quotes, with a backslash before special
// characters. A dollar sign is doubled instead, because systemd expands variables after it has removed the quotes.
func quoteSystemd(s string) string {
	if plainValue().MatchString(s) {
		return s
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "`", "\\`", `$`, `$$`).Replace(s) + `"`
}
