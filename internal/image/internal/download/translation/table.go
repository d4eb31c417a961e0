package translation

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"sigs.k8s.io/yaml"
)

const (
	maxFile  = 4 << 20 // bytes
	maxFiles = 1000
)

// Table holds the rules of all files.
type Table struct{ files []file }

// Endpoint is the location of an image and the transport to use.
type Endpoint struct {
	URL *url.URL
	// Source is the file with the rule; empty if the name itself is the URL.
	Source    string
	Transport Transport
}

type file struct {
	Prefix       string               `json:"prefix"`
	Translations []rule               `json:"translations"`
	Transports   map[string]transport `json:"transports"`

	path string
}

// document is a file, or Virtlet's custom resource with the file's content in Spec.
type document struct {
	file
	APIVersion string         `json:"apiVersion"`
	Kind       string         `json:"kind"`
	Metadata   map[string]any `json:"metadata"`
	Spec       *file          `json:"spec"`
}

// rule maps a name, or the names that match a regular expression, to a URL.
type rule struct {
	Name      string `json:"name"`
	Regexp    string `json:"regexp"`
	URL       string `json:"url"`
	Transport string `json:"transport"`

	expression *regexp.Regexp
}

// transport is a Transport as translation files write it.
type transport struct {
	// Timeout is in milliseconds; 0 means none.
	Timeout      int64  `json:"timeout"`
	MaxRedirects *int   `json:"maxRedirects"`
	Proxy        string `json:"proxy"`
	TLS          *struct {
		Certificates []struct {
			Cert string `json:"cert"`
			Key  string `json:"key"`
		} `json:"certificates"`
		ServerName string `json:"serverName"`
		Insecure   bool   `json:"insecure"`
	} `json:"tls"`

	built Transport
}

// invalidf returns an error for an invalid file: errdefs.ErrFailedPrecondition, because the node's configuration is at
// fault and not the request.
func invalidf(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, errdefs.ErrFailedPrecondition)...)
}

// Load reads the files *.yaml and *.yml in dir. If dir is missing, there are no files. If files are invalid, the error
// is errdefs.ErrFailedPrecondition and names all of them.
func Load(dir string) (*Table, error) {
	t := &Table{}
	if dir == "" {
		return t, nil
	}
	entries, err := os.ReadDir(dir) // sorted by name
	if errors.Is(err, fs.ErrNotExist) {
		return t, nil
	} else if err != nil {
		return nil, fmt.Errorf("image name translations: %w", err)
	}
	var errs []error
	for _, entry := range entries {
		// Skip hidden names: in a mounted config map, each file is a link into a hidden directory (..data).
		name := entry.Name()
		if ext := filepath.Ext(name); strings.HasPrefix(name, ".") || ext != ".yaml" && ext != ".yml" {
			continue
		}
		if len(t.files) == maxFiles {
			return nil, invalidf("image name translations: %s has more than %d files", dir, maxFiles)
		}
		f, err := read(filepath.Join(dir, name))
		if err != nil {
			errs = append(errs, fmt.Errorf("image name translations: %s: %w", filepath.Join(dir, name), err))
			continue
		}
		t.files = append(t.files, *f)
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return t, nil
}

func read(path string) (*file, error) {
	r, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	if info, err := r.Stat(); err != nil {
		return nil, err
	} else if !info.Mode().IsRegular() {
		return nil, invalidf("not a regular file but %s", info.Mode())
	}
	text, err := io.ReadAll(io.LimitReader(r, maxFile+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxFile {
		return nil, invalidf("more than %d bytes", maxFile)
	}
	f, err := parse(text)
	if f != nil {
		f.path = path
	}
	return f, err
}

// parse parses and checks one file.
func parse(text []byte) (*file, error) {
	var d document
	if err := yaml.UnmarshalStrict(text, &d); err != nil {
		return nil, invalidf("%v", err)
	}
	f := &d.file
	if d.Spec != nil {
		if len(f.Translations) > 0 || len(f.Transports) > 0 || f.Prefix != "" {
			return nil, invalidf("rules both in \"spec\" and beside it")
		}
		f = d.Spec
	}
	if d.Kind != "" && d.Kind != "VirtletImageMapping" {
		return nil, invalidf("kind %s is not VirtletImageMapping", d.Kind)
	}
	f.Prefix = strings.Trim(f.Prefix, "/")
	for name, t := range f.Transports {
		if err := t.build(); err != nil {
			return nil, fmt.Errorf("transport %q: %w", name, err)
		}
		f.Transports[name] = t
	}
	for i := range f.Translations {
		if err := f.Translations[i].check(f.Transports); err != nil {
			return nil, fmt.Errorf("translation %d: %w", i+1, err)
		}
	}
	return f, nil
}

func (r *rule) check(transports map[string]transport) (err error) {
	if _, ok := transports[r.Transport]; !ok && r.Transport != "" {
		return invalidf("the file has no transport %q", r.Transport)
	}
	switch {
	case r.URL == "":
		return invalidf("url is missing")
	case (r.Name == "") == (r.Regexp == ""):
		return invalidf("either name or regexp must be set")
	case r.Name != "":
		_, err = parseURL(r.URL)
		return err
	}
	if r.expression, err = regexp.Compile(r.Regexp); err != nil {
		return invalidf("regexp: %v", err)
	}
	return nil
}

// parseURL accepts http and https. Its errors never show a password.
func parseURL(text string) (*url.URL, error) {
	u, err := url.Parse(text)
	if err != nil {
		return nil, invalidf("url cannot be parsed") // the error of url.Parse contains the URL
	}
	if u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, invalidf("url %q is not http://… or https://…", u.Redacted())
	}
	return u, nil
}

// Find returns the endpoint of an image. The given name has neither the common prefix nor the tag ("ubuntu/22.04").
// Find searches the files in order of their names. In each file it tries first the rules with names and then those with
// regular expressions, both in the order of the file. A rule's name can include the tag; if no such rule matches, the
// tag is ignored. A name that has no rule and begins with a host ("example.org/disk.qcow2") is itself an https URL. For
// other names the error is errdefs.ErrNotFound.
func (t *Table) Find(name, tag string) (*Endpoint, error) {
	if tag != "" && tag != "latest" {
		for i := range t.files {
			if e, err := t.files[i].find(name+":"+tag, false); e != nil || err != nil {
				return e, err
			}
		}
	}
	for i := range t.files {
		if e, err := t.files[i].find(name, true); e != nil || err != nil {
			return e, err
		}
	}
	host, path, _ := strings.Cut(name, "/")
	if strings.Contains(host, ".") && path != "" {
		return &Endpoint{URL: &url.URL{Scheme: "https", Host: host, Path: "/" + path}, Transport: Transport{MaxRedirects: defaultRedirects}}, nil
	}
	return nil, fmt.Errorf("no translation file has a rule for %q, and it is not a host and path: %w", name, errdefs.ErrNotFound)
}

// find searches one file and returns nil if no rule matches. It tries the rules with regular expressions only if
// expressions is set.
func (f *file) find(name string, expressions bool) (*Endpoint, error) {
	if f.Prefix != "" {
		below, ok := strings.CutPrefix(name, f.Prefix+"/")
		if !ok {
			return nil, nil
		}
		name = below
	}
	at := slices.IndexFunc(f.Translations, func(r rule) bool { return r.Name == name })
	if at >= 0 {
		return f.endpoint(&f.Translations[at], f.Translations[at].URL)
	}
	for i := range f.Translations {
		r := &f.Translations[i]
		if !expressions || r.expression == nil {
			continue
		}
		if match := r.expression.FindStringSubmatchIndex(name); match != nil {
			return f.endpoint(r, string(r.expression.ExpandString(nil, r.URL, name, match)))
		}
	}
	return nil, nil
}

func (f *file) endpoint(r *rule, text string) (*Endpoint, error) {
	u, err := parseURL(text)
	if err != nil {
		return nil, fmt.Errorf("image name translations: %s: %w", f.path, err)
	}
	e := &Endpoint{URL: u, Source: f.path, Transport: Transport{MaxRedirects: defaultRedirects}}
	if t, ok := f.Transports[r.Transport]; ok {
		e.Transport = t.built
	}
	return e, nil
}

// build checks a transport and converts it for Client.
func (t *transport) build() error {
	t.built = Transport{Timeout: time.Duration(t.Timeout) * time.Millisecond, MaxRedirects: defaultRedirects}
	if t.Timeout < 0 || t.Timeout > int64(365*24*time.Hour/time.Millisecond) {
		return invalidf("timeout is %d ms", t.Timeout)
	}
	if t.MaxRedirects != nil {
		if t.built.MaxRedirects = *t.MaxRedirects; t.built.MaxRedirects < 0 {
			return invalidf("maxRedirects is %d", t.built.MaxRedirects)
		}
	}
	if t.Proxy != "" {
		u, err := url.Parse(t.Proxy)
		if err != nil || u.Host == "" || !slices.Contains([]string{"http", "https", "socks5", "socks5h"}, u.Scheme) {
			return invalidf("the proxy is not a URL such as http://proxy.example:8080")
		}
		t.built.Proxy = u
	}
	if t.TLS == nil {
		return nil
	}
	c := newTLS(t.TLS.ServerName, t.TLS.Insecure)
	for i, certificate := range t.TLS.Certificates {
		if err := addCertificate(c, certificate.Cert, certificate.Key); err != nil {
			return fmt.Errorf("tls certificate %d: %w", i+1, err)
		}
	}
	t.built.TLS = c
	return nil
}
