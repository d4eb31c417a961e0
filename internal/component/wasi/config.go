package wasi

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// Config is what wasi:config gives to the guest: environment variables, and the files of volumes. If several of them
// have a key, the first one counts, variables before volumes.
type Config struct {
	Env []string // NAME=value
	// Volumes are directories of the host. Each file at the top of a volume is a value, under the file's name. If a
	// volume has a link ..data, the files are below it: a kubelet keeps a ConfigMap or Secret in that way, and changes all
	// files at once by replacing the link (k8s.io/kubernetes/pkg/volume/util, AtomicWriter).
	Volumes []string
}

// Limits of wasi:config. A ConfigMap or Secret has at most 1 MiB (https://kubernetes.io/docs/concepts/configuration/secret).
const (
	maxConfigValue   = 1 << 20 // bytes
	maxConfigAll     = 4 << 20 // bytes of all keys and values
	maxConfigEntries = 4096    // in one directory
	// maxSwaps is how many times a volume can change while it is read.
	maxSwaps = 100
)

// dataLink is the link in a kubelet's volumes to the current files.
const dataLink = "..data"

// configKey matches the keys of ConfigMaps and Secrets; names that begin with two dots belong to the kubelet.
var configKey = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[-._a-zA-Z0-9]{1,253}$`) })

func isConfigKey(name string) bool {
	return configKey().MatchString(name) && name != "." && !strings.HasPrefix(name, "..")
}

// The errors of wasi:config that name their cause for the guest.
var (
	errConfigSize    = fmt.Errorf("the value is larger than %d bytes", maxConfigValue)
	errConfigAll     = fmt.Errorf("all values together are larger than %d bytes", maxConfigAll)
	errConfigEntries = fmt.Errorf("the volume has more than %d entries", maxConfigEntries)
	errConfigText    = errors.New("the value is not UTF-8")
	errConfigSwaps   = errors.New("the volume changes all the time")
	errNoValue       = errors.New("there is no such value") // stays inside the package
)

// configCall reads values for one call of the guest.
type configCall struct{ holding }

// get returns the value of a key, or errNoValue.
func (c *configCall) get(key string) (string, error) {
	for _, e := range c.options.Config.Env {
		if name, value, _ := strings.Cut(e, "="); name == key {
			return value, nil
		}
	}
	if !isConfigKey(key) {
		return "", errNoValue
	}
	for _, path := range c.options.Config.Volumes {
		value, err := inVolume(c, path, func(files *os.Root) (string, error) { return c.read(files, key) })
		if !errors.Is(err, errNoValue) {
			return value, err
		}
	}
	return "", errNoValue
}

// all returns all values that are text.
func (c *configCall) all() (map[string]string, error) {
	all, size := map[string]string{}, 0
	add := func(key, value string) error {
		if _, known := all[key]; known {
			return nil
		}
		if size += len(key) + len(value); size > maxConfigAll {
			return errConfigAll
		}
		all[key] = value
		return nil
	}
	for _, e := range c.options.Config.Env {
		if name, value, _ := strings.Cut(e, "="); utf8.ValidString(e) {
			if err := add(name, value); err != nil {
				return nil, err
			}
		}
	}
	for _, path := range c.options.Config.Volumes {
		values, err := inVolume(c, path, c.readAll)
		if err != nil {
			return nil, err
		}
		for key, value := range values {
			if err := add(key, value); err != nil {
				return nil, err
			}
		}
	}
	return all, nil
}

// inVolume calls read with the directory of a volume's files. If the volume changes while it is read, the files of the
// previous version can be missing, so inVolume begins again.
func inVolume[T any](c *configCall, path string, read func(files *os.Root) (T, error)) (T, error) {
	var none T
	root, err := os.OpenRoot(path)
	if err != nil {
		return none, err
	}
	defer root.Close()
	held := c.held
	for range maxSwaps {
		version, _ := root.Readlink(dataLink) // "" if there is no link
		result, err := below(root, version, read)
		if now, _ := root.Readlink(dataLink); now == version {
			return result, err
		}
		c.releaseTo(held)
	}
	return none, errConfigSwaps
}

// below calls read with the directory to which the link ..data leads or, if there is no link, with root.
func below[T any](root *os.Root, version string, read func(files *os.Root) (T, error)) (T, error) {
	if version == "" {
		return read(root)
	}
	files, err := root.OpenRoot(dataLink)
	if err != nil {
		var none T
		return none, err
	}
	defer files.Close()
	return read(files)
}

// read reads a value. It follows no link that leads out of the directory.
func (c *configCall) read(files *os.Root, key string) (string, error) {
	file, err := files.OpenFile(key, os.O_RDONLY|unix.O_NONBLOCK, 0) // a pipe must not block
	if errors.Is(err, fs.ErrNotExist) {
		return "", errNoValue
	}
	if err != nil {
		return "", err
	}
	defer file.Close()
	info, err := file.Stat()
	switch {
	case err != nil:
		return "", err
	case !info.Mode().IsRegular():
		return "", errNoValue
	case info.Size() > maxConfigValue:
		return "", errConfigSize
	}
	if err := c.hold(int(info.Size())); err != nil {
		return "", err
	}
	var text strings.Builder
	if _, err := io.Copy(&text, io.LimitReader(file, info.Size())); err != nil {
		return "", err
	}
	if !utf8.ValidString(text.String()) {
		return "", errConfigText
	}
	return text.String(), nil
}

// readAll reads all values of a directory. It leaves out what is not text, or leads out of the directory.
func (c *configCall) readAll(files *os.Root) (map[string]string, error) {
	dir, err := files.Open(".")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(maxConfigEntries + 1)
	switch {
	case err != nil && !errors.Is(err, io.EOF):
		return nil, err
	case len(names) > maxConfigEntries:
		return nil, errConfigEntries
	}
	all, size := map[string]string{}, 0
	for _, name := range names {
		if !isConfigKey(name) {
			continue
		}
		value, err := c.read(files, name)
		switch {
		case errors.Is(err, errNoValue), errors.Is(err, errConfigText), isEscape(err):
			continue
		case err != nil:
			return nil, err
		}
		if size += len(value); size > maxConfigAll {
			return nil, errConfigAll
		}
		all[name] = value
	}
	return all, nil
}

// isEscape reports whether an error of os.Root means that a path leads out of the directory.
func isEscape(err error) bool {
	_, number := errors.AsType[unix.Errno](err)
	_, path := errors.AsType[*fs.PathError](err)
	return path && !number
}

// failed writes the error case io. The text has no path of the host. If the error is ErrHeld, it ends the guest's call.
func (c *configCall) failed(what string, err error) error {
	if errors.Is(err, ErrHeld) {
		return err
	}
	text := err.Error()
	if number, ok := errors.AsType[unix.Errno](err); ok {
		text = number.Error()
	} else if isEscape(err) {
		text = "a link leads out of the volume"
	}
	c.FailedWith(1)
	c.Out = wit.AppendString(c.Out, what+": "+text)
	return nil
}

var configFuncs = map[string]Func{
	"get": func(call *Call) error {
		c := &configCall{holding{Call: call}}
		defer c.release()
		key := c.In.String()
		value, err := c.get(key)
		switch {
		case errors.Is(err, errNoValue):
			c.OK()
			c.Out = wit.AppendOption(c.Out, false)
		case err != nil:
			return c.failed(fmt.Sprintf("%q", key), err)
		default:
			c.OK()
			c.Out = wit.AppendString(wit.AppendOption(c.Out, true), value)
		}
		return nil
	},
	"get-all": func(call *Call) error {
		c := &configCall{holding{Call: call}}
		defer c.release()
		all, err := c.all()
		if err != nil {
			return c.failed("configuration", err)
		}
		c.OK()
		c.Out = wit.AppendLen(c.Out, len(all))
		for _, key := range slices.Sorted(maps.Keys(all)) {
			c.Out = wit.AppendString(wit.AppendString(c.Out, key), all[key])
		}
		return nil
	},
}
