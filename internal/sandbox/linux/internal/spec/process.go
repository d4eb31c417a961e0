package spec

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// defaultPath is PATH for images without one.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// ExecInput describes an additional program in a running container.
type ExecInput struct {
	// Spec is the container's specification.
	Spec *specs.Spec
	Cmd  []string
	TTY  bool
}

// Process returns the process of an exec. It is like the container's own process (user, capabilities, limits,
// no_new_privs, environment, working directory), but has the command and terminal of the exec. The OCI runtime adds the
// container's system call filter and namespaces.
//
// The process's stdin, stdout and stderr must not be files of the host, because crun 1.8 makes the process's user their
// owner.
func Process(in ExecInput) (*specs.Process, error) {
	if len(in.Cmd) == 0 {
		return nil, invalid("cmd", "must not be empty")
	}
	for _, arg := range in.Cmd {
		if err := checkText("cmd", arg); err != nil {
			return nil, err
		}
	}
	p := *in.Spec.Process
	p.Args = slices.Clone(in.Cmd)
	p.Terminal = in.TTY
	p.Env = slices.Clone(p.Env)
	if in.TTY {
		env := environment(p.Env)
		env.setDefault("TERM", "xterm")
		p.Env = env
	}
	return &p, nil
}

// arguments combines the request's command and args with the image's entrypoint and cmd, as Kubernetes does. A command
// replaces both entrypoint and cmd. Args without a command replace only cmd.
func arguments(c *runtimeapi.ContainerConfig, image ocispec.ImageConfig) ([]string, error) {
	argv := slices.Concat(c.GetCommand(), c.GetArgs())
	if len(c.GetCommand()) == 0 {
		args := c.GetArgs()
		if len(args) == 0 {
			args = image.Cmd
		}
		argv = slices.Concat(image.Entrypoint, args)
	}
	if len(argv) == 0 {
		return nil, invalid("command", "neither the request nor the image has a command")
	}
	for _, arg := range argv {
		if err := checkText("command", arg); err != nil {
			return nil, err
		}
		if !utf8.ValidString(arg) {
			return nil, invalid("command", "%q is not UTF-8", arg)
		}
	}
	return argv, nil
}

// environment is a list of NAME=value without duplicate names, in the order in which the names were first set.
type environment []string

func (e *environment) set(name, value string) {
	for i, entry := range *e {
		if n, _, _ := strings.Cut(entry, "="); n == name {
			(*e)[i] = name + "=" + value
			return
		}
	}
	*e = append(*e, name+"="+value)
}

func (e *environment) setDefault(name, value string) {
	if !slices.ContainsFunc(*e, func(entry string) bool { return strings.HasPrefix(entry, name+"=") }) {
		e.set(name, value)
	}
}

// variables returns the process's environment: the image's variables, HOSTNAME and the request's variables; later
// variables override earlier ones. PATH and, with a terminal, TERM have defaults.
func variables(p *sandbox.Pod, c *runtimeapi.ContainerConfig, image ocispec.ImageConfig, h Host) ([]string, error) {
	var env environment
	for _, entry := range image.Env {
		name, value, ok := strings.Cut(entry, "=")
		if !ok || name == "" {
			continue // a name without a value sets nothing
		}
		if err := checkVariable("image Env", name, value); err != nil {
			return nil, err
		}
		env.set(name, value)
	}
	hostname := p.Config.GetHostname()
	if hostname == "" {
		hostname = h.Name
	}
	env.set("HOSTNAME", hostname)
	for _, kv := range c.GetEnvs() {
		env.set(kv.GetKey(), string(kv.GetValue()))
	}
	env.setDefault("PATH", defaultPath)
	if c.GetTty() {
		env.setDefault("TERM", "xterm")
	}
	return env, nil
}

// home sets HOME for a user that is not in /etc/passwd. For the others the OCI runtimes set it, unless it is set, and so they do
// if a mount replaces the file. For a user without an entry, crun sets none and runc /.
func home(variables []string, known bool, mounts []*runtimeapi.Mount) []string {
	replaced := slices.ContainsFunc(mounts, func(m *runtimeapi.Mount) bool {
		return below("/etc/passwd", path.Clean(m.GetContainerPath()))
	})
	if known || replaced {
		return variables
	}
	env := environment(variables)
	env.setDefault("HOME", "/")
	return env
}

// checkEnvs rejects variables that an OCI specification cannot hold. CRI values are arbitrary bytes, but a
// specification is JSON and so must be UTF-8.
func checkEnvs(c *runtimeapi.ContainerConfig) error {
	for _, kv := range c.GetEnvs() {
		if err := checkVariable("envs", kv.GetKey(), string(kv.GetValue())); err != nil {
			return err
		}
	}
	return nil
}

func checkVariable(field, name, value string) error {
	switch {
	case name == "":
		return invalid(field, "a variable has no name")
	case strings.Contains(name, "="):
		return invalid(field, "the name %q contains =", name)
	case !utf8.ValidString(name), !utf8.ValidString(value):
		return invalid(field, "variable %q is not UTF-8, which an OCI runtime specification cannot carry", name)
	case strings.Contains(name, "\x00"), strings.Contains(value, "\x00"):
		return invalid(field, "variable %q contains a NUL byte", name)
	}
	return nil
}

// workingDir returns the request's working directory, otherwise the image's, otherwise "/". It rejects directories
// below /proc, even through the image's symlinks, because /proc/self/fd/N would lead to a descriptor of the OCI runtime
// (CVE-2024-21626). The OCI runtime creates a missing directory.
func workingDir(c *runtimeapi.ContainerConfig, image ocispec.ImageConfig, rootfs string) (string, error) {
	field, dir := "working_dir", c.GetWorkingDir()
	if dir == "" {
		field, dir = "image WorkingDir", image.WorkingDir
	}
	if dir == "" {
		return "/", nil
	}
	if err := checkWorkingDir(field, dir); err != nil {
		return "", err
	}
	dir = path.Clean(dir)
	real, err := insideRoot(rootfs, dir)
	if err != nil {
		return "", classifyFileError(field, fmt.Errorf("%q cannot be resolved in the image: %w", dir, err))
	}
	if below(real, "/proc") {
		return "", invalid(field, "%q leads to %s; nothing below /proc can be a working directory", dir, real)
	}
	return dir, nil
}

func checkWorkingDir(field, dir string) error {
	if dir == "" {
		return nil
	}
	if !path.IsAbs(dir) {
		return invalid(field, "%q is not absolute", dir)
	}
	if !utf8.ValidString(dir) {
		return invalid(field, "%q is not UTF-8", dir)
	}
	if below(path.Clean(dir), "/proc") {
		return invalid(field, "%q: nothing below /proc can be a working directory", dir)
	}
	return checkText(field, dir)
}
