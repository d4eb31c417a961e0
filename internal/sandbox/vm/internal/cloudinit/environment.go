package cloudinit

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/containerd/errdefs"
)

// The environment of the container, for the guest's shells (Virtlet's place) and for systemd's user sessions.
const (
	environmentPath  = "/etc/cloud/environment"
	environmentDPath = "/etc/environment.d/90-tripod.conf"
)

var (
	variable = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	// plainValue needs no quotes in a shell, nor for systemd.
	plainValue = regexp.MustCompile(`^[-+./:@%^,_A-Za-z0-9]*$`)
)

// environment is a text that a shell can source, with lines NAME=value where no quotes are needed, and one in the form of
// environment.d(5). Of variables that are there twice the last counts. A name with a line break, NUL or '=' in it, or a
// value with NUL, is refused; a name that a shell cannot have is left out with a warning.
func (b *builder) environment() (shell, systemd string, err error) {
	last := map[string]int{}
	for i, e := range b.in.Env {
		if e.Name == "" || strings.ContainsFunc(e.Name, control) || strings.Contains(e.Name, "=") {
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
		case !variable.MatchString(e.Name):
			b.warn("environment variable %q is not in the guest's files: no shell can have a variable of that name", e.Name)
		default:
			forShell.WriteString(e.Name + "=" + quoteShell(e.Value) + "\n")
			if e.Value != "" { // systemd has no empty variables: it calls the line invalid
				forSystemd.WriteString(e.Name + "=" + quoteSystemd(e.Value) + "\n")
			}
		}
	}
	return forShell.String(), forSystemd.String(), nil
}

// quoteShell is a word of the POSIX shell that means s.
func quoteShell(s string) string {
	if plainValue.MatchString(s) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// quoteSystemd is a value of environment.d(5) that means s: in double quotes a backslash stands before those characters
// that have a meaning there, and a dollar sign is written twice, since variables are replaced after the quotes are gone.
func quoteSystemd(s string) string {
	if plainValue.MatchString(s) {
		return s
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "`", "\\`", `$`, `$$`).Replace(s) + `"`
}
