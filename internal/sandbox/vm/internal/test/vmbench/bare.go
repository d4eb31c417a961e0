package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/cloudinit"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/qmp"
)

// bare is a QEMU started by hand.
type bare struct {
	// files is the directory with the kernel. seed is the path of a cloud-init disk like a pod's. dir is a temporary
	// directory.
	files, seed, dir string
	accel, driver    string
	memory           uint64
}

// seedMAC is the MAC address of the guest's NIC. QEMU's user network assigns 10.0.2.15 to this NIC.
const seedMAC = "52:54:00:12:34:56"

// writeSeed writes the cloud-init disk. It uses the code that writes the disks of pods.
func (b *bare) writeSeed() error {
	image, err := cloudinit.Build(cloudinit.Input{
		Options: annotations.Options{ImageType: annotations.NoCloud}, PodUID: "bare", Hostname: "bare",
		Interfaces: []cloudinit.Interface{{
			Name: "eth0", MAC: seedMAC, MTU: 1500, Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.2.15/24")},
			Routes: []cloudinit.Route{{Dst: netip.MustParsePrefix("0.0.0.0/0"), Via: netip.MustParseAddr("10.0.2.2")}},
		}},
	})
	if err != nil {
		return err
	}
	return image.WriteFile(b.seed, 0o600)
}

// live boots a machine, measures its memory and presses its power button.
func (b *bare) live(ctx context.Context) (l life, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	cmdline, err := os.ReadFile(filepath.Join(b.files, "cmdline"))
	if err != nil {
		return l, err
	}
	monitor := filepath.Join(b.dir, "monitor.sock")
	accel := b.accel
	if accel == "tcg" {
		accel += ",tb-size=32"
	}
	c := exec.CommandContext(ctx, "qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35", "-accel",
		accel, "-cpu", "max",
		"-m", strconv.FormatUint(b.memory>>20, 10), "-kernel", filepath.Join(b.files, "vmlinux"), "-initrd", filepath.Join(b.files, "initrd"),
		"-append", strings.TrimSpace(string(cmdline)), "-serial", "stdio", "-qmp", "unix:"+monitor+",server=on,wait=off", "-no-shutdown",
		"-netdev", "user,id=net0", "-device", "virtio-net-pci,netdev=net0,romfile=,mac="+seedMAC,
		"-drive", "if=virtio,format=raw,readonly=on,file="+b.seed)
	out, err := c.StdoutPipe()
	if err != nil {
		return l, err
	}
	started := time.Now()
	if err := c.Start(); err != nil {
		return l, err
	}
	defer func() {
		_ = c.Process.Kill()
		_ = c.Wait() // the error only says that the process was killed
	}()
	text := bufio.NewReader(out)
	for {
		line, err := text.ReadString('\n')
		if strings.Contains(line, readyLine) {
			break
		}
		if err != nil {
			return l, fmt.Errorf("the console ended before the guest was ready: %w", errors.Join(err, ctx.Err()))
		}
	}
	l.ready = time.Since(started)
	if l.cpu, err = processorTime(c.Process.Pid); err != nil {
		return l, err
	}
	if l.ram, l.rest, err = resident(c.Process.Pid, b.memory); err != nil {
		return l, err
	}
	go func() { _, _ = io.Copy(io.Discard, text) }() // a full pipe would stop the guest
	l.off, err = powerOff(ctx, monitor)
	return l, err
}

// powerOff presses the power button and returns the time until the guest has powered off.
func powerOff(ctx context.Context, monitor string) (time.Duration, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", monitor)
	if err != nil {
		return 0, err
	}
	client, err := qmp.NewClient(ctx, conn)
	if err != nil {
		return 0, err
	}
	defer client.Close()
	pressed := time.Now()
	if err := client.Execute(ctx, "system_powerdown", nil, nil); err != nil {
		return 0, err
	}
	for {
		select {
		case e := <-client.Events():
			if e.Name == "SHUTDOWN" {
				return time.Since(pressed), nil
			}
		case <-client.Done():
			return 0, fmt.Errorf("the monitor ended: %w", client.Err())
		case <-ctx.Done():
			return 0, fmt.Errorf("the guest does not power off: %w", ctx.Err())
		}
	}
}
