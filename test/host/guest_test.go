package host

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/tripod-run/tripod/test/harness"
)

const (
	// bootTime limits the time from power-on, or from the order to boot again, until sshd answers. Emulated, it takes a minute.
	bootTime = 5 * time.Minute
	// commandTime limits a command in the guest that sets no limit of its own.
	commandTime = 5 * time.Minute
)

// guest is the machine.
type guest struct {
	dir    string // of its files on the test's host
	port   int    // on loopback, forwarded to its sshd
	signer ssh.Signer

	mu     sync.Mutex
	client *ssh.Client // nil until the first command and after a boot
}

// openGuest starts the machine of a directory, or finds the one that runs there.
func openGuest(dir string) (*guest, error) {
	g := &guest{dir: dir}
	if err := g.loadKey(); err != nil {
		return nil, err
	}
	if raw, err := os.ReadFile(g.path("port")); err == nil {
		g.port, _ = strconv.Atoi(string(raw))
		if g.reachable(context.Background()) == nil {
			return g, g.refreshPayload()
		}
	}
	return g, g.start()
}

func (g *guest) path(name string) string { return filepath.Join(g.dir, name) }

// loadKey reads the key that may log in, or makes one.
func (g *guest) loadKey() error {
	raw, err := os.ReadFile(g.path("key"))
	if errors.Is(err, os.ErrNotExist) {
		_, key, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			return err
		}
		block, err := ssh.MarshalPrivateKey(key, "")
		if err != nil {
			return err
		}
		raw = pem.EncodeToMemory(block)
		if err := os.WriteFile(g.path("key"), raw, 0o600); err != nil {
			return err
		}
	} else if err != nil {
		return err
	}
	g.signer, err = ssh.ParsePrivateKey(raw)
	return err
}

// start boots the machine. Where KVM boots it, it is the accelerator; it is given a part of the time to prove that.
func (g *guest) start() error {
	if err := g.makePayload(); err != nil {
		return err
	}
	accels := []string{"tcg,thread=multi"}
	if f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0); err == nil {
		f.Close()
		accels = append([]string{"kvm"}, accels...)
	}
	var failures []error
	for _, accel := range accels {
		err := g.boot(accel)
		if err == nil {
			return nil
		}
		failures = append(failures, fmt.Errorf("accelerator %s: %w", accel, err))
		g.stop()
	}
	return errors.Join(failures...)
}

func (g *guest) boot(accel string) error {
	l, err := net.Listen("tcp", "127.0.0.1:0") // for a free port
	if err != nil {
		return err
	}
	g.port = l.Addr().(*net.TCPAddr).Port
	l.Close()
	image := filepath.Join(harness.Root(), "build", "images", "host")
	kernel := "root=LABEL=root rw console=ttyS0 no_timer_check apparmor=1 security=apparmor"
	if accel != "kvm" {
		kernel += " modprobe.blacklist=kvm_amd,kvm_intel" // QEMU 7.2's emulation of SVM panics the kernel or makes it hang
	}
	cmd := exec.Command("qemu-system-x86_64", "-machine", "q35", "-accel", accel, "-cpu", "max", "-smp", "2", "-m", "4096", "-display", "none",
		"-kernel", filepath.Join(image, "vmlinuz"), "-initrd", filepath.Join(image, "initrd.img"),
		"-append", kernel,
		"-drive", "file="+filepath.Join(image, "disk.qcow2")+",if=virtio,snapshot=on", "-drive",
		"file="+g.path("payload.raw")+",format=raw,if=virtio,snapshot=on",
		"-netdev", fmt.Sprintf("user,id=uplink,restrict=on,hostfwd=tcp:127.0.0.1:%d-:22", g.port), "-device", "virtio-net-pci,netdev=uplink",
		"-serial", "file:"+g.path("serial.log"), "-monitor", "none", "-pidfile", g.path("pid"), "-daemonize")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("QEMU: %w: %s", err, out)
	}
	if err := os.WriteFile(g.path("port"), []byte(strconv.Itoa(g.port)), 0o600); err != nil {
		return err
	}
	wait := bootTime
	if accel == "kvm" {
		wait = time.Minute
	}
	return g.waitBoot(wait)
}

// waitBoot waits until a command runs, and until the boot is complete.
func (g *guest) waitBoot(limit time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	for {
		err := g.reachable(ctx)
		if err == nil {
			_, err = g.command(ctx, "systemctl is-system-running --wait >/dev/null; true", nil)
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the guest does not answer (%s): %w", g.path("serial.log"), err)
		case <-time.After(time.Second):
		}
	}
}

func (g *guest) reachable(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	_, err := g.command(ctx, "true", nil)
	return err
}

// stop powers the machine off.
func (g *guest) stop() {
	g.disconnect()
	raw, err := os.ReadFile(g.path("pid"))
	if err != nil {
		return
	}
	if pid, err := strconv.Atoi(strings.TrimSpace(string(raw))); err == nil {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	_ = os.Remove(g.path("pid"))
	_ = os.Remove(g.path("port"))
}

func (g *guest) disconnect() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.client != nil {
		_ = g.client.Close()
		g.client = nil
	}
}

// session opens a session, with a new connection if there is none.
func (g *guest) session() (*ssh.Session, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.client != nil {
		if s, err := g.client.NewSession(); err == nil {
			return s, nil
		}
		_ = g.client.Close()
		g.client = nil
	}
	client, err := ssh.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", g.port), &ssh.ClientConfig{
		User: "root", Auth: []ssh.AuthMethod{ssh.PublicKeys(g.signer)}, Timeout: 20 * time.Second,
		HostKeyCallback: ssh.InsecureIgnoreHostKey(), // the port is one that our QEMU has opened on loopback
	})
	if err != nil {
		return nil, err
	}
	g.client = client
	return client.NewSession()
}

// commandError is a command that failed, with all its output.
type commandError struct {
	command, output string
	err             error
}

func (e *commandError) Error() string { return fmt.Sprintf("%s: %v\n%s", e.command, e.err, e.output) }
func (e *commandError) Unwrap() error { return e.err }

// command runs a shell command, and returns what it prints, also to its standard error.
func (g *guest) command(ctx context.Context, command string, stdin io.Reader) (string, error) {
	s, err := g.session()
	if err != nil {
		return "", err
	}
	defer s.Close()
	var out bytes.Buffer // of one stream, because the package writes to each by a goroutine of its own
	s.Stdin, s.Stdout = stdin, &out
	done := make(chan error, 1)
	go func() { done <- s.Run("exec 2>&1; PATH=$PATH:/usr/sbin:/sbin; " + command) }()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go g.watchPanic(ctx, cancel)
	select {
	case err = <-done:
	case <-ctx.Done():
		g.disconnect()
		<-done
		err = context.Cause(ctx)
	}
	if err != nil {
		return out.String(), &commandError{command, out.String(), err}
	}
	return out.String(), nil
}

// watchPanic cancels a command if the guest's kernel panics, which would otherwise take until the command's time is over.
func (g *guest) watchPanic(ctx context.Context, cancel context.CancelCauseFunc) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		if log, err := os.ReadFile(g.path("serial.log")); err == nil && bytes.Contains(log, []byte("Kernel panic - not syncing")) {
			cancel(fmt.Errorf("the guest's kernel has panicked:\n%s", tail(string(log), 20)))
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// makePayload makes the disk with what the tests bring.
func (g *guest) makePayload() error {
	root := harness.Root()
	tree := g.path("payload")
	if err := os.RemoveAll(tree); err != nil {
		return err
	}
	defer os.RemoveAll(tree)
	if err := os.MkdirAll(filepath.Join(tree, "build"), 0o755); err != nil {
		return err
	}
	key := ssh.MarshalAuthorizedKey(g.signer.PublicKey())
	if err := os.WriteFile(filepath.Join(tree, "authorized_keys"), key, 0o644); err != nil {
		return err
	}
	script := `
	cp --reflink=auto build/release/tripod_*.deb "$1/tripod.deb"
	mkdir -p "$1/build/images" && cp -r --reflink=auto build/images/{images.txt,key,oci,registry} "$1/build/images/"
	cp --reflink=auto build/images/images.yaml "$1/build/images/"
	mkdir -p "$1/build/test" && cp -r --reflink=auto build/bin "$1/build/" && cp -r --reflink=auto build/test/bin "$1/build/test/"
	cp build/tools/critest "$1/critest"
	cp --recursive --parents examples/edge "$1/"
	# What the end-to-end tests look for in the repository. The images are there already.
	mkdir -p "$1/hack" "$1/test" && cp go.mod "$1/" && cp -r test/e2e "$1/test/" && printf '#!/bin/sh\n' >"$1/hack/images.sh" && chmod 755 "$1/hack/images.sh"
	CGO_ENABLED=0 go test -c -vet=off -o "$1/e2e.test" ./test/e2e
	# A cluster, for TestKubelet.
	if kube=$(hack/kube.sh check 2>/dev/null); then
	  mkdir -p "$1/kube/${kube##*/}" "$1/test/kubelet"
	  cp --reflink=auto "$kube"/{kubelet,kubectl,kube-apiserver,kube-controller-manager,kube-scheduler,kube-proxy} "$1/kube/${kube##*/}/"
	  cp --recursive --parents contrib/kubernetes hack/kube.sh hack/kube/{,network/,metrics/}go.mod "$1/"
	  CGO_ENABLED=0 go test -c -vet=off -o "$1/kubelet.test" ./test/kubelet
	fi
	mke2fs -q -t ext4 -L payload -d "$1" "$2" 4G`
	cmd := exec.Command("bash", "-euc", script, "payload", tree, g.path("payload.raw"))
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("make the payload: %w: %s", err, out)
	}
	return nil
}

// refreshPayload brings what has been built since the machine was started.
func (g *guest) refreshPayload() error {
	ctx, cancel := context.WithTimeout(context.Background(), commandTime)
	defer cancel()
	files, err := filepath.Glob(filepath.Join(harness.Root(), "build", "release", "tripod_*.deb"))
	if err != nil || len(files) != 1 {
		return fmt.Errorf("packages in build/release: %v, %w", files, err)
	}
	f, err := os.Open(files[0])
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = g.command(ctx, "cat >/payload/tripod.deb", f)
	return err
}

// run runs a shell command and fails the test if the command fails.
func (g *guest) run(t testing.TB, format string, args ...any) string {
	t.Helper()
	out, err := g.try(t, format, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// try runs a shell command.
func (g *guest) try(t testing.TB, format string, args ...any) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), commandTime) // also for clean-ups
	defer cancel()
	return g.command(ctx, fmt.Sprintf(format, args...), nil)
}
