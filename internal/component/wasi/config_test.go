package wasi

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wit"
)

const (
	configStore = "wasi:config/store"
	configIO    = 1 // the case of error
)

func writeFiles(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Error(err)
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Error(err)
		}
	}
}

// publish makes a volume show files as a kubelet does: in a new directory, to which the link ..data leads from now on.
func publish(t *testing.T, volume, version string, files map[string]string) {
	t.Helper()
	writeFiles(t, filepath.Join(volume, ".."+version), files)
	link := filepath.Join(volume, "..data_tmp")
	previous, _ := os.Readlink(filepath.Join(volume, dataLink))
	err := errors.Join(os.Symlink(".."+version, link), os.Rename(link, filepath.Join(volume, dataLink)))
	for name := range files {
		_ = os.Symlink(filepath.Join(dataLink, name), filepath.Join(volume, name))
	}
	if previous != "" {
		err = errors.Join(err, os.RemoveAll(filepath.Join(volume, previous)))
	}
	if err != nil {
		t.Error(err)
	}
}

// config returns a value, "none" or "error: " with its text.
func (g *guest) config(key string) string {
	g.t.Helper()
	r := g.call(configStore, "get", str(key))
	switch {
	case r.Case(2) != 0:
		if which := r.Case(2); which != configIO {
			g.t.Fatalf("the error is case %d, want io", which)
		}
		return "error: " + r.String()
	case !r.Option():
		return "none"
	}
	return r.String()
}

func (g *guest) allConfig() map[string]string {
	g.t.Helper()
	r := ok(g.t, g.call(configStore, "get-all"))
	all := map[string]string{}
	for range r.Len() {
		key := r.String()
		all[key] = r.String()
	}
	return all
}

func TestConfig(t *testing.T) {
	volume, plain := t.TempDir(), t.TempDir()
	publish(t, volume, "1", map[string]string{"color": "blue", "HOME": "volume", "empty": "", "binary": "\xff"})
	writeFiles(t, plain, map[string]string{"color": "green", "size": "10"})
	g := newGuest(t, Options{Config: Config{Env: []string{"HOME=/", "MODE=fast=yes"}, Volumes: []string{volume, plain}}})
	for key, want := range map[string]string{
		"color": "blue", "HOME": "/", "MODE": "fast=yes", "size": "10", "empty": "", "missing": "none",
		"binary": `error: "binary": the value is not UTF-8`,
	} {
		if got := g.config(key); got != want {
			t.Errorf("get(%q) = %q, want %q", key, got, want)
		}
	}
	want := "map[HOME:/ MODE:fast=yes color:blue empty: size:10]"
	if got := fmt.Sprint(g.allConfig()); got != want {
		t.Errorf("get-all = %s, want %s", got, want)
	}
	publish(t, volume, "2", map[string]string{"color": "red"})
	if got := g.config("color"); got != "red" {
		t.Errorf("get = %q after an update, want red", got)
	}
	if got := g.config("empty"); got != "none" {
		t.Errorf("get = %q of a removed value, want none", got)
	}
}

// TestHostileConfig: names and links lead to nothing outside of the volume, pipes do not block, and sizes are bounded.
func TestHostileConfig(t *testing.T) {
	outside, volume := t.TempDir(), t.TempDir()
	writeFiles(t, outside, map[string]string{"secret": "hidden"})
	writeFiles(t, volume, map[string]string{"fine": "yes", "big": strings.Repeat("x", maxConfigValue+1), "..old": "x"})
	if err := os.Symlink(filepath.Join(outside, "secret"), filepath.Join(volume, "link")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(volume, "pipe"), 0o644); err != nil {
		t.Fatal(err)
	}
	writeFiles(t, filepath.Join(volume, "directory"), nil)
	g := newGuest(t, Options{Config: Config{Volumes: []string{volume}}})
	for key, want := range map[string]string{
		"../" + filepath.Base(outside) + "/secret": "none", "fine\x00": "none", "/etc/passwd": "none", "..": "none", ".": "none", "": "none",
		"..old": "none", "directory/../fine": "none", "pipe": "none", "directory": "none", strings.Repeat("k", 254): "none", "fine": "yes",
		"link": `error: "link": a link leads out of the volume`, "big": fmt.Sprintf("error: %q: %v", "big", errConfigSize),
	} {
		if got := g.config(key); got != want {
			t.Errorf("get(%q) = %q, want %q", key, got, want)
		}
	}
	failed(t, g.call(configStore, "get-all"), configIO)
	if err := os.Remove(filepath.Join(volume, "big")); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(g.allConfig()); got != "map[fine:yes]" {
		t.Errorf("get-all = %s, want fine only", got)
	}
	// A link ..data that leads out of the volume.
	if err := os.Symlink(outside, filepath.Join(volume, dataLink)); err != nil {
		t.Fatal(err)
	}
	if got, want := g.config("secret"), `error: "secret": a link leads out of the volume`; got != want {
		t.Errorf("get = %q, want %q", got, want)
	}
}

// TestConfigIsBounded: neither many entries nor many values use memory without limit.
func TestConfigIsBounded(t *testing.T) {
	many, large := t.TempDir(), t.TempDir()
	for i := range maxConfigEntries + 1 {
		writeFiles(t, many, map[string]string{fmt.Sprint("k", i): ""})
	}
	for i := range 5 {
		writeFiles(t, large, map[string]string{fmt.Sprint("k", i): strings.Repeat("x", maxConfigValue)})
	}
	for volume, want := range map[string]error{many: errConfigEntries, large: errConfigAll} {
		g := newGuest(t, Options{Config: Config{Volumes: []string{volume}}})
		r := g.call(configStore, "get-all")
		failed(t, r, configIO)
		if got := r.String(); got != "configuration: "+want.Error() {
			t.Errorf("get-all = %q, want %v", got, want)
		}
	}
	q := &share{most: maxConfigValue}
	g := newGuest(t, Options{Bytes: q, Config: Config{Volumes: []string{large}}})
	if _, err := g.try(configStore, "get", str("k1")); err == nil || !strings.Contains(err.Error(), "resources hold more") {
		t.Errorf("get beyond the limit of host memory: %v", err)
	}
	if q.used != 0 {
		t.Errorf("%d bytes are held after the call", q.used)
	}
}

// TestConfigWhileItChanges: a reader sees one version of a volume, whenever the kubelet replaces it.
func TestConfigWhileItChanges(t *testing.T) {
	volume := t.TempDir()
	version := func(n int) map[string]string { return map[string]string{"a": fmt.Sprint(n), "b": fmt.Sprint(n)} }
	publish(t, volume, "0", version(0))
	const last = 200
	done := make(chan struct{})
	go func() {
		defer close(done)
		for n := 1; n <= last; n++ {
			publish(t, volume, fmt.Sprint(n), version(n))
		}
	}()
	g := newGuest(t, Options{Config: Config{Volumes: []string{volume}}})
	read := func() (string, bool) {
		r := g.call(configStore, "get-all")
		if r.Case(2) != 0 {
			return "", false // the volume has changed maxSwaps times meanwhile
		}
		if n := r.Len(); n != 2 {
			t.Fatalf("get-all returned %d values, want 2", n)
		}
		_, a, _, b := r.String(), r.String(), r.String(), r.String()
		if a != b {
			t.Fatalf("get-all mixed the versions %s and %s", a, b)
		}
		return a, true
	}
	for changing := true; changing; {
		select {
		case <-done:
			changing = false
		default:
			read()
		}
	}
	if got, ok := read(); !ok || got != fmt.Sprint(last) {
		t.Errorf("get-all = %q, want the last version, %d", got, last)
	}
}

// TestConfigReadAgain: what was read of previous versions does not count.
func TestConfigReadAgain(t *testing.T) {
	volume, n := t.TempDir(), 0
	publish(t, volume, "0", nil)
	c := &configCall{holding{Call: &Call{State: NewState(Options{})}}}
	_, err := inVolume(c, volume, func(*os.Root) (string, error) {
		if n++; n < maxSwaps {
			publish(t, volume, fmt.Sprint(n), nil)
		}
		return "", c.hold(maxHeld / 4)
	})
	if err != nil || n != maxSwaps || c.held != maxHeld/2 {
		t.Errorf("after %d times %d bytes are held, error %v; want %d times and %d bytes", n, c.held, err, maxSwaps, maxHeld/2)
	}
}

func TestLogging(t *testing.T) {
	var got []string
	g := newGuest(t, Options{Log: func(entry []byte) { got = append(got, string(entry)) }})
	log := func(level int, context, message string) {
		g.call("wasi:logging/logging", "log", wit.AppendCase(nil, level), str(context), str(message))
	}
	log(0, "", "begin")
	log(2, "orders", "two words")
	log(5, "db", "first\nlevel=INFO msg=forged")
	log(4, strings.Repeat("c", maxLogContext+1), strings.Repeat("ä", maxLogMessage/2+10)+"end")
	want := []string{
		"level=TRACE msg=begin\n", "level=INFO msg=\"two words\" context=orders\n",
		"level=CRITICAL msg=\"first\\nlevel=INFO msg=forged\" context=db\n",
		fmt.Sprintf("level=ERROR msg=\"%s… (23 bytes more)\" context=\"%s… (1 bytes more)\"\n", strings.Repeat("ä", maxLogMessage/2),
			strings.Repeat("c", maxLogContext)),
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("entries are\n%.300q\nwant\n%.300q", got, want)
	}
	newGuest(t, Options{}).call("wasi:logging/logging", "log", wit.AppendCase(nil, 1), str(""), str("discarded"))
}
