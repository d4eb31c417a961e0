package spec

import (
	"bytes"
	"errors"
	"io/fs"
	"math"
	"slices"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	// maxUserFile limits the size in bytes of an image's /etc/passwd and of its /etc/group.
	maxUserFile = 4 << 20
	// maxID is the largest accepted user or group ID. The kernel's IDs have 32 bits, but much software stores an ID as
	// a signed number, and treats the ID as root's if that number overflows (CVE-2024-40635).
	maxID = math.MaxInt32
	// maxGroups is the kernel's NGROUPS_MAX.
	maxGroups = 65536
)

// identity is a requested user and optional group, by ID or name.
type identity struct {
	field       string // the field to name in errors
	user, group string // a number or a name; group may be empty
}

// requestedIdentity returns the request's user, otherwise the image's USER. If the request sets a user, nothing in the
// image's USER applies, not even its group.
func requestedIdentity(sc *runtimeapi.LinuxContainerSecurityContext, imageUser string) identity {
	const prefix = "linux.security_context."
	id := identity{field: "image USER"}
	id.user, id.group, _ = strings.Cut(imageUser, ":")
	switch {
	case sc.GetRunAsUser() != nil:
		id = identity{field: prefix + "run_as_user", user: strconv.FormatInt(sc.GetRunAsUser().GetValue(), 10)}
	case sc.GetRunAsUsername() != "":
		id = identity{field: prefix + "run_as_username", user: sc.GetRunAsUsername()}
	}
	if sc.GetRunAsGroup() != nil {
		id.group = strconv.FormatInt(sc.GetRunAsGroup().GetValue(), 10)
	}
	return id
}

// checkUser checks the user fields as far as possible without the image.
func checkUser(sc *runtimeapi.LinuxContainerSecurityContext) error {
	const prefix = "linux.security_context."
	switch {
	case sc.GetRunAsUser() != nil && sc.GetRunAsUsername() != "":
		return invalid(prefix+"run_as_user", "only one of run_as_user and run_as_username may be set")
	case sc.GetRunAsGroup() != nil && sc.GetRunAsUser() == nil && sc.GetRunAsUsername() == "":
		return invalid(prefix+"run_as_group", "needs run_as_user or run_as_username too")
	case len(sc.GetSupplementalGroups()) > maxGroups-1:
		return invalid(prefix+"supplemental_groups", "%d groups are more than the kernel's %d", len(sc.GetSupplementalGroups()), maxGroups)
	}
	if _, ok := runtimeapi.SupplementalGroupsPolicy_name[int32(sc.GetSupplementalGroupsPolicy())]; !ok {
		return invalid(prefix+"supplemental_groups_policy", "unknown policy %d", sc.GetSupplementalGroupsPolicy())
	}
	if err := checkText(prefix+"run_as_username", sc.GetRunAsUsername()); err != nil {
		return err
	}
	if err := checkRunAs(sc); err != nil {
		return err
	}
	for _, g := range sc.GetSupplementalGroups() {
		if _, err := checkID(prefix+"supplemental_groups", g); err != nil {
			return err
		}
	}
	return nil
}

// checkRunAs checks that the user and group IDs of a container or a pod are in range.
func checkRunAs(sc interface {
	GetRunAsUser() *runtimeapi.Int64Value
	GetRunAsGroup() *runtimeapi.Int64Value
}) error {
	for field, id := range map[string]*runtimeapi.Int64Value{"run_as_user": sc.GetRunAsUser(), "run_as_group": sc.GetRunAsGroup()} {
		if id != nil {
			if _, err := checkID("linux.security_context."+field, id.GetValue()); err != nil {
				return err
			}
		}
	}
	return nil
}

func checkID(field string, id int64) (uint32, error) {
	if id < 0 || id > maxID {
		return 0, invalid(field, "%d is not between 0 and %d", id, maxID)
	}
	return uint32(id), nil
}

// number parses s as an ID if s is a number. A number is always an ID, even if the image has a user of that name.
func number(field, s string) (id uint32, isNumber bool, err error) {
	digits := strings.TrimPrefix(s, "-")
	if digits == "" || strings.Trim(digits, "0123456789") != "" {
		return 0, false, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil { // the string has only digits, so the number is out of range
		return 0, true, invalid(field, "%s is not between 0 and %d", s, maxID)
	}
	id, err = checkID(field, n)
	return id, true, err
}

// user resolves the process's identity in the container's root file system. Without a requested group, the primary
// group is the user's group in /etc/passwd, or 0. The additional groups always include the primary group, so that a
// process needs privileges to drop its primary group (CVE-2022-36109). known reports whether the user is in /etc/passwd.
func user(sc *runtimeapi.LinuxContainerSecurityContext, imageUser, rootfs string) (u specs.User, known bool, err error) {
	requested := requestedIdentity(sc, imageUser)
	passwd, err := userFile(rootfs, "etc/passwd")
	if err != nil {
		return u, false, err
	}
	groups, err := userFile(rootfs, "etc/group")
	if err != nil {
		return u, false, err
	}
	entry, err := findUser(requested, passwd)
	if err != nil {
		return u, false, err
	}
	u.UID, u.GID = entry.uid, entry.gid
	if requested.group != "" {
		if u.GID, err = findGroup(requested, groups); err != nil {
			return u, false, err
		}
	}
	u.AdditionalGids, err = additionalGroups(sc, u.GID, entry.name, groups)
	return u, entry.name != "", err
}

// containerUser converts a process's user to the CRI's form.
func containerUser(u specs.User) *runtimeapi.ContainerUser {
	linux := &runtimeapi.LinuxContainerUser{Uid: int64(u.UID), Gid: int64(u.GID)}
	for _, g := range u.AdditionalGids {
		linux.SupplementalGroups = append(linux.SupplementalGroups, int64(g))
	}
	return &runtimeapi.ContainerUser{Linux: linux}
}

// passwdEntry is a user; name is empty for an ID that is not in /etc/passwd.
type passwdEntry struct {
	name     string
	uid, gid uint32
}

// findUser finds a user in the lines of /etc/passwd (name:password:uid:gid:gecos:home:shell). A user
// requested by ID need not be in the file.
func findUser(requested identity, passwd [][]byte) (passwdEntry, error) {
	if requested.user == "" {
		requested.user = "0"
	}
	uid, isID, err := number(requested.field, requested.user)
	if err != nil {
		return passwdEntry{}, err
	}
	for _, line := range passwd {
		f := strings.Split(string(line), ":")
		if len(f) < 4 {
			continue
		}
		if isID {
			if id, ok, err := number("", f[2]); !ok || err != nil || id != uid {
				continue
			}
		} else if f[0] != requested.user {
			continue
		}
		return parseUser(requested.field, f)
	}
	if isID {
		return passwdEntry{uid: uid}, nil
	}
	return passwdEntry{}, invalid(requested.field, "no user %q in /etc/passwd of the image", requested.user)
}

func parseUser(field string, f []string) (passwdEntry, error) {
	entry := passwdEntry{name: f[0]}
	var err error
	if entry.uid, err = fileID(field, "user", "/etc/passwd", f[0], f[2]); err == nil {
		entry.gid, err = fileID(field, "user", "/etc/passwd", f[0], f[3])
	}
	return entry, err
}

// fileID parses the ID of a user or group in one of the image's files. All arguments but the last are for the error
// message.
func fileID(field, kind, file, name, s string) (uint32, error) {
	id, isNumber, err := number(field, s)
	if err != nil || !isNumber {
		return 0, invalid(field, "%s %q has ID %q in %s of the image, which is not between 0 and %d", kind, name, s, file, maxID)
	}
	return id, nil
}

// findGroup finds a group in the lines of /etc/group (name:password:gid:member,member).
func findGroup(requested identity, groups [][]byte) (uint32, error) {
	gid, isID, err := number(requested.field, requested.group)
	if err != nil || isID {
		return gid, err
	}
	for _, line := range groups {
		f := strings.Split(string(line), ":")
		if len(f) < 3 || f[0] != requested.group {
			continue
		}
		return fileID(requested.field, "group", "/etc/group", f[0], f[2])
	}
	return 0, invalid(requested.field, "no group %q in /etc/group of the image", requested.group)
}

// additionalGroups returns the primary group, followed by all other groups in ascending order: the request's groups
// and, unless the policy is Strict, the user's groups in /etc/group.
func additionalGroups(sc *runtimeapi.LinuxContainerSecurityContext, primary uint32, name string, groups [][]byte) ([]uint32, error) {
	const field = "linux.security_context.supplemental_groups"
	var more []uint32
	for _, g := range sc.GetSupplementalGroups() {
		gid, err := checkID(field, g)
		if err != nil {
			return nil, err
		}
		more = append(more, gid)
	}
	if sc.GetSupplementalGroupsPolicy() == runtimeapi.SupplementalGroupsPolicy_Merge && name != "" {
		for _, line := range groups {
			f := strings.Split(string(line), ":")
			if len(f) < 4 || !slices.Contains(strings.Split(strings.TrimSpace(f[3]), ","), name) {
				continue
			}
			gid, err := fileID(field, "group", "/etc/group", f[0], f[2])
			if err != nil {
				return nil, err
			}
			more = append(more, gid)
		}
	}
	slices.Sort(more)
	all := append([]uint32{primary}, slices.DeleteFunc(slices.Compact(more), func(g uint32) bool { return g == primary })...)
	if len(all) > maxGroups {
		return nil, invalid(field, "%d groups, from the request and /etc/group of the image, are more than the kernel's %d", len(all), maxGroups)
	}
	return all, nil
}

// userFile returns the lines of an image's user or group file. A missing file has no lines.
func userFile(rootfs, name string) ([][]byte, error) {
	text, err := readInRoot(rootfs, name, maxUserFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, classifyFileError("image", err)
	}
	return bytes.Split(text, []byte("\n")), nil
}
