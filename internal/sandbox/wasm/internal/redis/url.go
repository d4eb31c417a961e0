package redis

import (
	"cmp"
	"fmt"
	"net/url"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
)

// Address says where the pairs of a pod are.
type Address struct {
	Host           string // a name or an address
	Port           uint16
	TLS            bool
	User, Password string
	Database       uint16
	// Prefix is put before each key, and the keys without it are invisible.
	Prefix string
}

const defaultPort = "6379"

// ParseURL parses redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE][?prefix=PREFIX], or rediss:// for TLS
// (https://www.iana.org/assignments/uri-schemes/prov/redis). Its errors are errdefs.ErrInvalidArgument, and do not contain
// the URL, which can have a password.
func ParseURL(text string) (a Address, err error) {
	bad := func(what string) (Address, error) {
		return Address{}, fmt.Errorf("not a URL such as redis://HOST:6379/0: %s: %w", what, errdefs.ErrInvalidArgument)
	}
	u, err := url.Parse(text)
	if err != nil {
		return bad("the syntax is wrong")
	}
	port, err := strconv.ParseUint(cmp.Or(u.Port(), defaultPort), 10, 16)
	database, dbErr := strconv.ParseUint(cmp.Or(strings.TrimPrefix(u.Path, "/"), "0"), 10, 16)
	query := u.Query()
	prefix := query.Get("prefix")
	query.Del("prefix")
	switch {
	case u.Scheme != "redis" && u.Scheme != "rediss":
		return bad("the scheme is neither redis nor rediss")
	case u.Opaque != "" || u.Hostname() == "":
		return bad("there is no host")
	case err != nil || port == 0:
		return bad("the port is not a number from 1 to 65535")
	case dbErr != nil:
		return bad("the path is not the number of a database")
	case len(query) > 0 || u.Fragment != "":
		return bad("the only parameter is prefix")
	case len(prefix) > maxPrefix:
		return bad(fmt.Sprintf("the prefix is longer than %d bytes", maxPrefix))
	}
	password, _ := u.User.Password()
	return Address{Host: u.Hostname(), Port: uint16(port), TLS: u.Scheme == "rediss", User: u.User.Username(), Password: password,
		Database: uint16(database), Prefix: prefix}, nil
}

// maxPrefix bounds a prefix, in bytes.
const maxPrefix = 1 << 10
