package guestagent

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

const (
	defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	// maxDatabase is the maximum number of bytes to read from each of /etc/passwd and /etc/group.
	maxDatabase = 1 << 20
)

// user is the account under which a program runs.
type user struct {
	name     string
	uid, gid uint32
	groups   []uint32
	home     string
	shell    string
}

// lookUp resolves a user in the format of container images: NAME or UID, optionally followed by ":" and a group name or
// ID. "" is root. An ID need not be in the databases passwd and group.
func lookUp(spec, passwd, group string) (user, error) {
	name, groupName, withGroup := strings.Cut(spec, ":")
	if name == "" {
		name = "0"
	}
	u := user{home: "/", shell: "/bin/sh"}
	found := false
	for _, f := range records(passwd, 7) {
		if f[0] != name && f[2] != name || found && f[0] != name { // names take precedence over IDs
			continue
		}
		uid, err1 := strconv.ParseUint(f[2], 10, 31)
		gid, err2 := strconv.ParseUint(f[3], 10, 31)
		if err1 != nil || err2 != nil {
			continue
		}
		u, found = user{name: f[0], uid: uint32(uid), gid: uint32(gid), home: f[5], shell: f[6]}, true
		if f[0] == name {
			break
		}
	}
	if !found {
		uid, err := strconv.ParseUint(name, 10, 31)
		if err != nil {
			return user{}, errors.New("the guest has no user " + strconv.Quote(name))
		}
		u.uid = uint32(uid)
		if uid == 0 {
			u.name, u.home = "root", "/root"
		}
	}
	groups := records(group, 4)
	if withGroup {
		return u, u.setGroup(groupName, groups)
	}
	for _, f := range groups {
		if gid, err := strconv.ParseUint(f[2], 10, 31); err == nil && u.name != "" && slices.Contains(strings.Split(f[3], ","), u.name) {
			u.groups = append(u.groups, uint32(gid))
		}
	}
	return u, nil
}

func (u *user) setGroup(name string, groups [][]string) error {
	for _, f := range groups {
		if f[0] == name {
			name = f[2]
			break
		}
	}
	gid, err := strconv.ParseUint(name, 10, 31)
	if err != nil {
		return errors.New("the guest has no group " + strconv.Quote(name))
	}
	u.gid = uint32(gid)
	return nil
}

// records reads a database whose lines have the given number of fields. A missing database is empty.
func records(path string, fields int) (all [][]string) {
	content, err := readSome(path, maxDatabase)
	if err != nil {
		return nil
	}
	for line := range strings.Lines(content) {
		if f := strings.Split(strings.TrimRight(line, "\n"), ":"); len(f) == fields {
			all = append(all, f)
		}
	}
	return all
}

// credential returns the credential for starting a program as this user. It is nil for the agent's own user, so that
// exec works even if the kernel lacks the system calls for groups.
func (u user) credential() *syscall.Credential {
	if u.uid == uint32(os.Getuid()) && u.gid == uint32(os.Getgid()) && len(u.groups) == 0 {
		return nil
	}
	return &syscall.Credential{Uid: u.uid, Gid: u.gid, Groups: u.groups}
}

// directory returns the home directory, or "/" if the home directory does not exist.
func (u user) directory() string {
	if st, err := os.Stat(u.home); err == nil && st.IsDir() {
		return u.home
	}
	return "/"
}

// environment returns a program's environment. The request's variables override the defaults.
func (u user) environment(tty bool, request []string) []string {
	env := []string{"PATH=" + defaultPath, "HOME=" + u.directory(), "SHELL=" + u.shell}
	if u.name != "" {
		env = append(env, "USER="+u.name, "LOGNAME="+u.name)
	}
	if tty {
		env = append(env, "TERM=xterm")
	}
	for _, v := range request {
		key, _, _ := strings.Cut(v, "=")
		env = slices.DeleteFunc(env, func(old string) bool { return strings.HasPrefix(old, key+"=") })
		env = append(env, v)
	}
	return env
}

// findProgram finds a program the way a shell does: in PATH or, if the name has a slash, relative to dir.
func findProgram(name, dir string, env []string) (string, error) {
	if strings.Contains(name, "/") {
		path := name
		if !filepath.IsAbs(path) {
			path = filepath.Join(dir, path)
		}
		return path, executable(path)
	}
	var path string
	for _, v := range env {
		if value, ok := strings.CutPrefix(v, "PATH="); ok {
			path = value
		}
	}
	for _, in := range filepath.SplitList(path) {
		if !filepath.IsAbs(in) {
			in = filepath.Join(dir, in)
		}
		if found := filepath.Join(in, name); executable(found) == nil {
			return found, nil
		}
	}
	return "", &os.PathError{Op: "exec", Path: name, Err: notInPath{}}
}

type notInPath struct{}

func (notInPath) Error() string { return "executable file not found in the guest's $PATH" }
func (notInPath) Unwrap() error { return os.ErrNotExist }

func executable(path string) error {
	st, err := os.Stat(path)
	switch {
	case err != nil:
		return &os.PathError{Op: "exec", Path: path, Err: errors.Unwrap(err)}
	case st.IsDir():
		return &os.PathError{Op: "exec", Path: path, Err: syscall.EACCES}
	case st.Mode()&0o111 == 0:
		return &os.PathError{Op: "exec", Path: path, Err: os.ErrPermission}
	}
	return nil
}
