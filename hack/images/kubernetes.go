package main

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// agnhostProgram returns the path of the program agnhost, or "" if hack/kube.sh has not built the program. Building
// takes minutes, and only test/e2enode needs agnhost.
func agnhostProgram(ctx context.Context) string {
	out, err := exec.CommandContext(ctx, "hack/kube.sh", "check", "e2e").Output()
	if err != nil {
		return ""
	}
	return filepath.Join(strings.TrimSpace(string(out)), "agnhost")
}

// kubernetes adds the images of Kubernetes' public node tests, under the names used in v1.37.
func (s *set) kubernetes(ctx context.Context, agnhost string) {
	shell, err := s.shell(ctx)
	if err != nil {
		s.err = errors.Join(s.err, err)
		return
	}
	s.add(e2e+"busybox:1.37.0-2", v1.Config{Env: env, Cmd: []string{"sh"}}, shell)
	s.add(e2e+"nonroot:1.5", v1.Config{Env: env, Cmd: []string{"sh"}, User: "1234"}, shell)

	resolver := tree{} // in this image, hostname -f uses the C library
	s.install(resolver, "bin/hostname")
	s.add(e2e+"glibc-dns-testing:2.1.1", v1.Config{Env: env}, shell, resolver)

	if agnhost == "" {
		return
	}
	t, err := s.agnhost(ctx, agnhost)
	if err != nil {
		s.err = errors.Join(s.err, err)
		return
	}
	c := v1.Config{Env: env, Entrypoint: []string{"/agnhost"}, Cmd: []string{"pause"}}
	for _, tag := range []string{"2.66.1", "2.55"} {
		s.add(e2e+"agnhost:"+tag, c, shell, t, mark("version", tag))
	}
	// A test reads these files when the image is mounted as a volume.
	volume := mark("data.json", `{"image": "kitten.jpg"}`)
	volume.text("etc/os-release", "NAME=\"a stand-in for Alpine Linux\"\n")
	s.add(e2e+"kitten:1.8", v1.Config{Env: env, Cmd: []string{"/agnhost", "test-webserver"}}, shell, t, volume)
}

// install copies programs to the paths that they have in the packages. It keeps the first error.
func (s *set) install(t tree, programs ...string) {
	for _, p := range programs {
		if err := s.debian.install(t, p, p); err != nil && s.err == nil {
			s.err = err
		}
	}
}

// shell returns a layer with a shell that passes on the whole environment, even variables with invalid names.
func (s *set) shell(ctx context.Context) (tree, error) {
	program, err := compile(ctx, "./hack/images/shell", s.scratch)
	if err != nil {
		return nil, err
	}
	t := tree{}
	t.file("bin/sh", 0o755, program)
	s.install(t, "bin/bash")
	return t, nil
}

// agnhost returns a layer with the agnhost program and everything that the tests of agnhost expect: a certificate,
// curl, netcat, users, a directory for uploads, and the image that agnhost serves as a registry.
func (s *set) agnhost(ctx context.Context, program string) (tree, error) {
	data, err1 := os.ReadFile(program)
	source, err2 := exec.CommandContext(ctx, "go", "list", "-C", "hack/kube", "-f", "{{.Dir}}",
		"k8s.io/kubernetes/test/images/agnhost/porter").Output()
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	t := tree{}
	t.file("agnhost", 0o755, data)
	for _, name := range []string{"localhost.crt", "localhost.key"} {
		data, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(source)), name))
		if err != nil {
			return nil, err
		}
		t.file(name, 0o644, data)
	}
	t.symlink("agnhost-2", "agnhost")
	t.dir(0o755, "uploads")
	t.text("etc/passwd", passwd+"user-defined-in-image:x:1000:1000::/home/user-defined-in-image:/bin/sh\n")
	t.text("etc/group", group+"user-defined-in-image:x:1000:\ngroup-defined-in-image:x:50000:user-defined-in-image\n")
	s.install(t, "usr/bin/curl", "bin/nc.openbsd")
	t.symlink("bin/nc", "nc.openbsd") // busybox's nc lacks UDP
	for _, im := range s.images {
		if im.name == "pause:3.10.2" {
			return t, serve(t, "pause", "testing", im)
		}
	}
	return nil, errors.New("the image pause:3.10.2 is missing")
}

// serve adds an image to t in the layout that `agnhost fake-registry-server` serves. In this layout, a tag is a file
// that contains a digest. Content is in var/registry/NAME/{manifests,blobs}/sha256/AB/ABCD.../data.
func serve(t tree, name, tag string, im image) error {
	one, err := im.manifest(runtime.GOARCH)
	if err != nil {
		return err
	}
	dir := "var/registry/" + name + "/"
	put := func(kind string, hash v1.Hash, data []byte) {
		t.text(dir+kind+"/"+hash.Algorithm+"/"+hash.Hex[:2]+"/"+hash.Hex+"/data", string(data))
	}
	manifest, err1 := one.RawManifest()
	manifestHash, err2 := one.Digest()
	config, err3 := one.RawConfigFile()
	configHash, err4 := one.ConfigName()
	layers, err5 := one.Layers()
	if err := errors.Join(err1, err2, err3, err4, err5); err != nil {
		return err
	}
	t.text(dir+"manifests/"+tag, manifestHash.String()+"\n")
	put("manifests", manifestHash, manifest)
	put("blobs", configHash, config)
	for _, l := range layers {
		hash, err1 := l.Digest()
		r, err2 := l.Compressed()
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		data, err := io.ReadAll(r)
		if err := errors.Join(err, r.Close()); err != nil {
			return err
		}
		put("blobs", hash, data)
	}
	return nil
}
