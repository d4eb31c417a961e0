package main

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// The public repositories whose images are replaced. The names omit the host of the registry.
const (
	e2e   = "e2e-test-images/"
	cri   = "k8s-staging-cri-tools/"
	hub   = "docker/library/"
	house = "tripod/" // our own
)

// image is one image of the set. Its name has the form NAME:TAG. The lowest layer is the first.
type image struct {
	name   string
	layers []v1.Layer
	config v1.Config
	// arches are the architectures in the index; nil means only the architecture of this machine.
	arches []string
	// bare means that there is no index: the tag refers to a manifest.
	bare bool
}

// set collects the images.
type set struct {
	debian  debian
	cloud   *kernel
	full    *kernel
	scratch string
	base    v1.Layer
	images  []image
	err     error
}

var env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}

// newSet makes every image from the packages, and from the program agnhost if agnhost is not "".
func (s store) newSet(ctx context.Context, debs *download, agnhost, scratch string) ([]image, error) {
	d, err1 := readDebs(ctx, s.path("debs"), debs.files)
	cloud, err2 := readKernel(ctx, s.path("debs"), debs.files, debs.cloud, wantModule)
	full, err3 := readKernel(ctx, s.path("debs"), debs.files, debs.full, wantModule)
	if err := errors.Join(err1, err2, err3); err != nil {
		return nil, err
	}
	base, err := d.base(ctx, scratch)
	if err != nil {
		return nil, err
	}
	b := &set{debian: d, cloud: cloud, full: full, scratch: scratch}
	b.base = b.layer(base)
	b.busyboxes()
	b.users()
	b.markers()
	b.servers()
	b.programs(ctx)
	b.own()
	b.wasmRootfs()
	if b.err == nil {
		b.err = b.machines(ctx, s.path("vm"))
	}
	b.kubernetes(ctx, agnhost)
	slices.SortFunc(b.images, func(a, b image) int { return strings.Compare(a.name, b.name) })
	return b.images, b.err
}

// layer packs a tree. It keeps the first error.
func (s *set) layer(t tree) v1.Layer {
	l, err := t.layer()
	if err != nil && s.err == nil {
		s.err = err
	}
	return l
}

// shell returns the configuration of an image that runs a shell.
func shell() v1.Config { return v1.Config{Env: env, Cmd: []string{"sh"}} }

// add adds an image. Its layers are the base layer and, above that, one layer for each tree.
func (s *set) add(name string, c v1.Config, trees ...tree) *image {
	im := image{name: name, config: c, layers: []v1.Layer{s.base}}
	for _, t := range trees {
		im.layers = append(im.layers, s.layer(t))
	}
	s.images = append(s.images, im)
	return &s.images[len(s.images)-1]
}

// mark returns a layer with one small file. The file makes an image differ from similar images.
func mark(name, content string) tree {
	t := tree{}
	t.text(name, content+"\n")
	return t
}

func (s *set) busyboxes() {
	s.add(e2e+"busybox:1.29-2", shell())
	for _, tag := range []string{"1", "1-glibc", "1-musl", "1-uclibc", "1.35.0-glibc"} {
		s.add(hub+"busybox:"+tag, shell(), mark("flavour", tag))
	}
}

// users adds images with a default user.
func (s *set) users() {
	for name, user := range map[string]string{
		"uid": "1002", "username": "www-data", "uid-group": "1003:1004", "username-group": "www-data:1004",
	} {
		c := shell()
		c.User = user
		s.add(cri+"test-image-user-"+name+":latest", c)
	}
	c := shell()
	c.User = "1000"
	t := tree{}
	t.text("etc/passwd", passwd+"default-user:x:1000:1000::/home/default-user:/bin/sh\n")
	t.text("etc/group", group+"default-user:x:1000:\ngroup-defined-in-image:x:50000:default-user\n")
	s.add(cri+"test-image-predefined-group:latest", c, t)
}

// markers adds images for pulling, tagging and listing.
func (s *set) markers() {
	for _, n := range []string{"1", "2", "3", "latest", "digest"} {
		s.add(cri+"test-image-"+n+":latest", shell(), mark("test-image-"+n, n))
	}
	for _, tag := range []string{"test", "all"} {
		s.add(cri+"test-image-tag:"+tag, shell(), mark("tag", tag))
	}
	for _, tag := range []string{"1", "2", "3"} { // one image with three tags
		s.add(cri+"test-image-tags:"+tag, shell(), mark("tags", "the same"))
	}
}

const nginxConf = `user www-data;
worker_processes 1;
pid /var/run/nginx.pid;
error_log /dev/stderr notice;
events { worker_connections 128; }
http {
	access_log /dev/stdout;
	default_type text/html;
	server { listen %s; location / { root /usr/share/nginx/html; index index.html; } }
}
`

// servers adds web servers.
func (s *set) servers() {
	for name, port := range map[string]string{
		e2e + "nginx:1.14-2": "80", e2e + "nginx:1.27.0-2": "80", cri + "hostnet-nginx-amd64:latest": "12003",
	} {
		t := tree{}
		t.dir(0o755, "run", "var/lib/nginx", "var/log/nginx")
		s.install(t, "usr/sbin/nginx")
		t.text("etc/nginx/nginx.conf", fmt.Sprintf(nginxConf, port))
		t.text("usr/share/nginx/html/index.html", "<!DOCTYPE html><title>Welcome to nginx!</title><h1>Welcome to nginx!</h1>\n")
		s.add(name, v1.Config{
			Env: env, Entrypoint: []string{"/usr/sbin/nginx"}, Cmd: []string{"-g", "daemon off;"},
			ExposedPorts: map[string]struct{}{port + "/tcp": {}}, StopSignal: "SIGQUIT",
		}, t)
	}
	// As with Apache, the log begins with the command line. Test suites look for this line.
	t := tree{}
	t.text("www/index.html", "It works!\n")
	s.add(e2e+"httpd:2.4.39-4", v1.Config{
		Env: env, Cmd: []string{"sh", "-c", "echo 'httpd -D FOREGROUND: listening on port 80'; exec httpd -f -v -p 80 -h /www"},
		ExposedPorts: map[string]struct{}{"80/tcp": {}},
	}, t)
}

// programs adds images of our own small programs.
func (s *set) programs(ctx context.Context) {
	nnp, err1 := compile(ctx, "./hack/images/nonewprivs", s.scratch)
	pause, err2 := compile(ctx, "./hack/images/pause", s.scratch)
	if err := errors.Join(err1, err2); err != nil {
		s.err = err
		return
	}
	t := tree{}
	t.file("nnp", 0o4755, nnp)
	for _, tag := range []string{"1.3", "1.4"} {
		s.add(e2e+"nonewprivs:"+tag, v1.Config{Env: env, Entrypoint: []string{"/nnp"}}, t)
	}

	t = tree{}
	t.file("pause", 0o755, pause)
	l := s.layer(t)
	for _, tag := range []string{"3.6", "3.9", "3.10", "3.10.1", "3.10.2"} {
		s.images = append(s.images, image{name: "pause:" + tag, layers: []v1.Layer{l},
			config: v1.Config{Env: env, Entrypoint: []string{"/pause"}, User: "65535:65535"}})
	}
}

// own adds images that only our own tests need. Each image tests something that a runtime can get wrong.
func (s *set) own() {
	s.add(house+"busybox:1", shell())
	s.add(house+"bare:1", shell(), mark("bare", "a manifest without an index")).bare = true
	s.add(house+"index:1", shell()).arches = []string{"amd64", "arm64", "s390x"}

	// The configuration of this image has every kind of setting, and labels that look like the control keys of
	// runtimes.
	t := tree{}
	t.dir(0o755, "data")
	t.text("data/seed", "from the image\n")
	t.text("etc/passwd", passwd+"app:x:1234:5678::/srv:/bin/sh\n")
	t.add("srv/own", &entry{typ: tar.TypeReg, mode: 0o600, uid: 1234, gid: 5678, data: []byte("mine\n")})
	s.add(house+"config:1", v1.Config{
		Env:        append([]string{"GREETING=hello from the image", "EMPTY="}, env...),
		Entrypoint: []string{"/bin/sh", "-c"},
		Cmd:        []string{`echo "$GREETING in $(pwd) as $(id -u):$(id -g)"; exec sleep 3600`},
		User:       "app:5678", WorkingDir: "/srv",
		ExposedPorts: map[string]struct{}{"8080/tcp": {}, "5353/udp": {}},
		Volumes:      map[string]struct{}{"/data": {}},
		StopSignal:   "SIGUSR1",
		Labels: map[string]string{
			"org.opencontainers.image.title": "config", "io.cri-containerd.image": "managed",
			"containerd.io/restart.status": "running", "io.kubernetes.pod.namespace": "kube-system", "tripod.run/managed": "true",
		},
	}, t)

	// The program exits with the expected code only on the image's stop signal.
	s.add(house+"stopsignal:1", v1.Config{
		Env: env, StopSignal: "SIGUSR1",
		Cmd: []string{"sh", "-c",
			"trap 'echo got USR1; exit 7' USR1; trap 'echo got TERM; exit 15' TERM; echo ready; while :; do sleep 1 & wait $!; done"},
	})
	s.layered()
	s.hostile()
}

// layered adds an image with two layers. The upper layer changes the lower layer in every way that a layer can.
func (s *set) layered() {
	low, high := tree{}, tree{}
	low.text("layers/kept", "low\n")
	low.text("layers/replaced", "low\n")
	low.text("layers/deleted", "low\n")
	low.text("layers/opaque/deleted", "low\n")
	low.text("layers/becomes-dir", "low\n")
	low.text("layers/linked", "low\n")
	high.text("layers/replaced", "high\n")
	high.text("layers/.wh.deleted", "")
	high.text("layers/opaque/.wh..wh..opq", "")
	high.text("layers/opaque/new", "high\n")
	high.dir(0o750, "layers/becomes-dir")
	high.text("layers/a", "twice\n")
	high.hardlink("layers/b", "layers/a")
	high.symlink("layers/link", "kept")
	high.file("layers/setuid", 0o4755, []byte("#!/bin/sh\n"))
	s.add(house+"layers:1", shell(), low, high)
}

// hostile adds images that are valid but malicious (see docs/testing.md).
func (s *set) hostile() {
	t := tree{} // paths that a runtime opens or mounts; all of them lead outside the root file system
	t.symlink("etc/passwd", "/../../../../etc/tripod-outside/passwd")
	t.symlink("etc/group", "../../../../../etc/tripod-outside/group")
	t.symlink("work", "/../../../../etc")
	t.symlink("data", "../../../../../../etc")
	t.symlink("loop", "loop")
	s.add(house+"symlinks:1", v1.Config{Env: env, Cmd: []string{"sh"}, Volumes: map[string]struct{}{"/data": {}}}, t)

	t = tree{} // names that look like numbers, user IDs out of range, and a huge file of groups
	t.text("etc/passwd", passwd+"1000:x:2000:2000::/:/bin/sh\nbig:x:4294967299:1::/:/bin/sh\nnegative:x:-5:1::/:/bin/sh\n")
	t.text("etc/group", group+strings.Repeat("g:x:7:"+strings.Repeat("member,", 140)+"x\n", 32<<10))
	s.add(house+"users:1", shell(), t)
}
