package registry

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"strings"
	"sync/atomic"

	"github.com/containerd/errdefs"
)

// Docker Hub has three names: the namespace in references, the host of the registry, and the host in logins.
const (
	dockerHub         = "docker.io"
	dockerHubRegistry = "registry-1.docker.io"
	dockerHubIndex    = "index.docker.io"
)

// Auth is a login to a registry (CRI AuthConfig). The first of Username, Auth, IdentityToken and RegistryToken that is
// set applies. A login is never logged or stored.
type Auth struct {
	Username, Password string
	// Auth is base64 of "username:password".
	Auth string
	// ServerAddress is the registry that the login is valid for; empty means the registry in the reference.
	ServerAddress string
	// IdentityToken is exchanged for an access token at the registry's token server.
	IdentityToken string
	// RegistryToken is sent to the registry unchanged, as a bearer token.
	RegistryToken string
}

// login is the login to a registry; empty for anonymous access.
type login struct {
	// secret is the password, or an identity token if username is empty.
	username, secret string
	// bearer is a token that is sent unchanged.
	bearer string
}

// logins holds the logins of one pull.
type logins struct {
	request *login
	// requestHosts are the hosts that may receive the request's login.
	requestHosts map[string]bool
	// file are the logins in the docker config file by the repositories that they are for, such as "host" or "host/team", and
	// bad the entries that cannot be read.
	file map[string]login
	bad  map[string]error
	// repository is the path of the repository in a registry, such as "team/app".
	repository string
	// used is set once a host has received a login.
	used atomic.Bool
}

func (l *logins) use(login bool) {
	if login {
		l.used.Store(true)
	}
}

// newLogins prepares the logins for a pull from registry, which is the host in the reference, and the repository in it.
func newLogins(auth *Auth, dockerConfig, registry, repository string) (*logins, error) {
	l := &logins{requestHosts: map[string]bool{}, repository: repository}
	if auth != nil {
		request, err := auth.login()
		if err != nil {
			return nil, fmt.Errorf("login for %s: %w", registry, err)
		}
		l.request = &request
		if address := hostOf(auth.ServerAddress); address != "" {
			l.requestHosts[address] = true
		}
	}
	if dockerConfig != "" {
		var err error
		if l.file, l.bad, err = readDockerConfig(dockerConfig); err != nil {
			return nil, err
		}
	}
	return l, nil
}

// trust lets a host receive the request's login, unless the login names another host. The host must be the registry's
// own, not a mirror.
func (l *logins) trust(registry, host string, auth *Auth) {
	if l.request == nil {
		return
	}
	if address := hostOf(auth.ServerAddress); address == "" || address == hostOf(registry) || address == hostOf(host) {
		l.requestHosts[hostOf(host)] = true
	}
}

// find returns the login for a host: the request's login if the host may receive it, otherwise the login in the docker
// config file that is for the longest prefix of the repository. It returns an error if that cannot be read.
func (l *logins) find(host string) (login, error) {
	host = hostOf(host)
	if l.request != nil && l.requestHosts[host] {
		return *l.request, nil
	}
	for at := path.Join(host, l.repository); at != "."; at = path.Dir(at) {
		if found, ok := l.file[at]; ok {
			return found, nil
		}
		if err := l.bad[at]; err != nil {
			return login{}, err
		}
	}
	return login{}, nil
}

func (a *Auth) login() (login, error) {
	switch {
	case a.Username != "":
		return login{username: a.Username, secret: a.Password}, nil
	case a.Auth != "":
		return decodeAuth(a.Auth)
	case a.IdentityToken != "":
		return login{secret: a.IdentityToken}, nil
	default:
		return login{bearer: a.RegistryToken}, nil
	}
}

func decodeAuth(auth string) (login, error) {
	plain, err := base64.StdEncoding.DecodeString(auth)
	if err != nil {
		return login{}, fmt.Errorf("\"auth\" is not base64: %w", errdefs.ErrInvalidArgument)
	}
	username, password, ok := strings.Cut(string(plain), ":")
	if !ok {
		return login{}, fmt.Errorf("\"auth\" is not username:password: %w", errdefs.ErrInvalidArgument)
	}
	return login{username: username, secret: strings.Trim(password, "\x00")}, nil
}

// readDockerConfig reads the "auths" of a docker config.json. It ignores credential helpers, because a root daemon
// should not run such programs. A missing file means no logins. An entry that cannot be read concerns only its registry.
func readDockerConfig(file string) (found map[string]login, bad map[string]error, err error) {
	data, err := os.ReadFile(file)
	if os.IsNotExist(err) {
		return nil, nil, nil
	} else if err != nil {
		return nil, nil, fmt.Errorf("docker config: %w", err)
	}
	var config struct {
		Auths map[string]json.RawMessage
	}
	if err := json.Unmarshal(data, &config); err != nil {
		return nil, nil, fmt.Errorf("docker config %s is not valid: %w", file, errdefs.ErrFailedPrecondition)
	}
	found, bad = map[string]login{}, map[string]error{}
	for address, entry := range config.Auths {
		var a struct{ Username, Password, Auth, IdentityToken, RegistryToken string }
		err := json.Unmarshal(entry, &a)
		if err == nil {
			auth := Auth{Username: a.Username, Password: a.Password, Auth: a.Auth, IdentityToken: a.IdentityToken, RegistryToken: a.RegistryToken}
			var l login
			if l, err = auth.login(); err == nil && l != (login{}) { // an empty one belongs to a credential helper
				found[repositoryOf(address)] = l
			}
		}
		if err != nil {
			bad[repositoryOf(address)] = fmt.Errorf("docker config %s, %q: %w: %w", file, address, err, errdefs.ErrInvalidArgument)
		}
	}
	return found, bad, nil
}

// repositoryOf returns what a key of a docker config.json is for: a registry's host, or a repository or group of repositories in
// it. Old keys end with the version of the API.
func repositoryOf(address string) string {
	_, rest, ok := strings.Cut(address, "://")
	if !ok {
		rest = address
	}
	_, below, _ := strings.Cut(strings.Trim(rest, "/"), "/")
	if below == "v1" || below == "v2" {
		below = ""
	}
	return path.Join(hostOf(address), below)
}

// hostOf returns the host in a registry's address, without a scheme or path. It returns docker.io for all names of
// Docker Hub.
func hostOf(address string) string {
	if _, rest, ok := strings.Cut(address, "://"); ok {
		address = rest
	}
	address, _, _ = strings.Cut(address, "/")
	address = strings.ToLower(address)
	if address == dockerHubRegistry || address == dockerHubIndex {
		return dockerHub
	}
	return address
}
