package broker

import (
	"crypto/subtle"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/crypto/bcrypt"
)

// users checks credentials and access to topics.
type users struct {
	byName map[string]user
	// checking bounds the number of concurrent password checks, because bcrypt is slow on purpose.
	checking chan struct{}
}

type user struct {
	password    []byte // the password or its bcrypt hash; nil if no password is required
	read, write []string
}

// newUsers returns nil for an empty list. A nil *users allows everything.
func newUsers(list []User) (*users, error) {
	if len(list) == 0 {
		return nil, nil
	}
	u := &users{byName: map[string]user{}, checking: make(chan struct{}, 2)}
	for _, l := range list {
		if _, twice := u.byName[l.Name]; twice || l.Name == "" {
			return nil, fmt.Errorf("broker: user %q: the name is empty or used twice: %w", l.Name, errdefs.ErrInvalidArgument)
		}
		var one user
		if l.PasswordFile != "" {
			text, err := os.ReadFile(l.PasswordFile)
			if err != nil {
				return nil, fmt.Errorf("broker: user %q: password: %w", l.Name, err)
			}
			one.password = []byte(strings.TrimRight(string(text), "\r\n"))
			if len(one.password) == 0 {
				return nil, fmt.Errorf("broker: user %q: %s is empty: %w", l.Name, l.PasswordFile, errdefs.ErrInvalidArgument)
			}
		}
		one.read, one.write = slices.Clone(l.Read), slices.Clone(l.Write)
		for _, realm := range l.Realms {
			one.read, one.write = append(one.read, realm+"/#"), append(one.write, realm+"/#")
		}
		u.byName[l.Name] = one
	}
	return u, nil
}

// admit checks a user name and a password. A name that comes from a verified certificate needs no password.
func (u *users) admit(name string, password []byte, certified string) bool {
	if u == nil {
		return true
	}
	if name == "" {
		name = certified
	}
	one, ok := u.byName[name]
	switch {
	case !ok:
		return false
	case certified != "" && certified == name, one.password == nil:
		return true
	case !strings.HasPrefix(string(one.password), "$2"):
		return subtle.ConstantTimeCompare(one.password, password) == 1
	}
	u.checking <- struct{}{}
	defer func() { <-u.checking }()
	return bcrypt.CompareHashAndPassword(one.password, password) == nil
}

// known reports whether there is a user of the given name.
func (u *users) known(name string) bool {
	if u == nil {
		return true
	}
	_, ok := u.byName[name]
	return ok
}

// allowed reports whether a user has access to a topic, or to all topics that match a filter.
func (u *users) allowed(name, client, topic string, write bool) bool {
	if u == nil {
		return true
	}
	one := u.byName[name]
	filters := one.read
	if write {
		filters = one.write
	}
	if group, ok := strings.CutPrefix(topic, "$share/"); ok {
		_, topic, _ = strings.Cut(group, "/")
	}
	for _, f := range filters {
		if strings.Contains(f, "%") {
			// A name with a wildcard would match the topics of other users or clients.
			if strings.ContainsAny(name+client, "+#/") {
				continue
			}
			f = strings.NewReplacer("%u", name, "%c", client).Replace(f)
		}
		if covers(f, topic) {
			return true
		}
	}
	return false
}

// covers reports whether the allowed filter matches everything that the requested topic or filter matches (MQTT 5.0
// §4.7).
func covers(allowed, asked string) bool {
	if strings.HasPrefix(asked, "$") != strings.HasPrefix(allowed, "$") {
		return false // a wildcard at the first level does not match topics that begin with "$" (§4.7.2)
	}
	for {
		a, restA, moreA := strings.Cut(allowed, "/")
		q, restQ, moreQ := strings.Cut(asked, "/")
		switch {
		case a == "#":
			return true
		case q == "#", a != "+" && a != q:
			return false
		case !moreA && !moreQ:
			return true
		case !moreQ:
			return restA == "#" // "a/#" covers "a"
		case !moreA:
			return false
		}
		allowed, asked = restA, restQ
	}
}
