package image

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"github.com/containerd/errdefs"
)

// dockerHub is the namespace whose registry has another name, and whose login has a third.
const (
	dockerHub         = "docker.io"
	dockerHubRegistry = "registry-1.docker.io"
	dockerHubIndex    = "index.docker.io"
)

// login is what a registry is told; it is empty for a visitor.
type login struct {
	// username and secret; without a username the secret is an identity token.
	username, secret string
	// bearer is sent as it is.
	bearer string
}

// logins finds the login for a host. It is made for one pull.
type logins struct {
	request *login
	// requestHosts are the hosts that the request's login may go to.
	requestHosts map[string]bool
	file         map[string]login
}

// newLogins prepares the logins of a pull from registry (the host part of the reference).
func newLogins(auth *Auth, dockerConfig, registry string) (*logins, error) {
	l := &logins{requestHosts: map[string]bool{}}
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
		file, err := readDockerConfig(dockerConfig)
		if err != nil {
			return nil, err
		}
		l.file = file
	}
	return l, nil
}

// trust names the host that stands for the registry itself. The login of a request goes there unless it names another.
func (l *logins) trust(registry, host string, auth *Auth) {
	if l.request == nil {
		return
	}
	if address := hostOf(auth.ServerAddress); address == "" || address == hostOf(registry) || address == hostOf(host) {
		l.requestHosts[hostOf(host)] = true
	}
}

// find returns the login for a host that asked for one: the request's if it may go there, else the file's.
func (l *logins) find(host string) login {
	host = hostOf(host)
	if l.request != nil && l.requestHosts[host] {
		return *l.request
	}
	return l.file[host]
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

// readDockerConfig reads the "auths" of a docker config.json. Credential helpers are programs that a root daemon
// ought not to start, so they are not used. No file is no logins.
func readDockerConfig(path string) (map[string]login, error) {
	data, err := os.ReadFile(path)
	if os.IsNotExist(err) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("docker config: %w", err)
	}
	var file struct {
		Auths map[string]struct {
			Username, Password, Auth, IdentityToken, RegistryToken string
		}
	}
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, fmt.Errorf("docker config %s is not valid: %w", path, errdefs.ErrFailedPrecondition)
	}
	found := map[string]login{}
	for address, a := range file.Auths {
		auth := Auth{Username: a.Username, Password: a.Password, Auth: a.Auth, IdentityToken: a.IdentityToken, RegistryToken: a.RegistryToken}
		l, err := auth.login()
		if err != nil {
			return nil, fmt.Errorf("docker config %s, %q: %w", path, address, err)
		}
		found[hostOf(address)] = l
	}
	return found, nil
}

// hostOf makes one name of the ways to write a registry: with a scheme, a path, or docker.io's other names.
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
