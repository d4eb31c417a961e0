package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/tripod-run/tripod/internal/cli"
)

// readyLine is the line that the guest prints after its boot.
const readyLine = "TRIPOD-GUEST-READY"

// patience bounds the boot and the shutdown of a guest.
const patience = 3 * time.Minute

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "vmbench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	n := &node{}
	b := &bare{}
	socket := flag.String("socket", "/run/tripod/tripod.sock", "CRI socket of the node")
	flag.StringVar(&n.image, "image", "", "image with the kernel and the initramfs in -files")
	flag.StringVar(&n.logs, "log-dir", "/var/log/pods", "directory of the pods' logs")
	flag.IntVar(&n.daemon, "daemon", 0, "process ID of the daemon whose memory is measured")
	flag.StringVar(&b.files, "files", "build/images/vm", "directory with vmlinux, initrd and cmdline")
	flag.StringVar(&b.accel, "accel", "tcg", "accelerator of the node's machines, kvm or tcg")
	flag.Uint64Var(&b.memory, "memory", 128<<20, "the guest's memory in bytes")
	flag.StringVar(&b.driver, "driver", "qmp", "the node's driver, for the report")
	rounds := flag.Int("rounds", 10, "number of boots of each")
	crowd := flag.Int("crowd", 4, "number of concurrent machines when the daemon's memory is measured")
	flag.Parse()
	n.memory = b.memory
	ctx = cli.Quiet(ctx)
	client, err := cli.Connect(ctx, *socket, patience)
	if err != nil {
		return err
	}
	defer client.Close(context.WithoutCancel(ctx))
	n.client = client
	if b.dir, err = os.MkdirTemp("", "vmbench-"); err != nil {
		return err
	}
	defer os.RemoveAll(b.dir)
	b.seed = filepath.Join(b.dir, "cidata.iso")
	if err := b.writeSeed(); err != nil {
		return err
	}
	if err := n.ensureImage(ctx); err != nil {
		return err
	}
	return measure(ctx, n, b, *rounds, *crowd)
}

// life holds the measurements of one boot and shutdown.
type life struct {
	// whole is the time from RunPodSandbox until the guest prints readyLine. ready is the time from StartContainer, or
	// from exec for QEMU by hand, until the guest prints readyLine.
	whole, ready time.Duration
	// off is how long StopContainer takes. For QEMU by hand, it is the time from the power button to the monitor's
	// SHUTDOWN.
	off time.Duration
	// cpu is QEMU's processor time until the guest is ready. Unlike ready, it depends little on the host's load.
	cpu time.Duration
	// ram is the resident part of the guest's memory in bytes. rest is QEMU's other resident memory in bytes.
	ram, rest uint64
}

func measure(ctx context.Context, n *node, b *bare, rounds, crowd int) error {
	var ours, theirs []life
	for round := range rounds + 1 {
		mine, err := n.live(ctx, fmt.Sprintf("vm-%d", round))
		if err != nil {
			return err
		}
		other, err := b.live(ctx)
		if err != nil {
			return fmt.Errorf("QEMU by hand: %w", err)
		}
		if round > 0 { // the first round is a warm-up
			ours, theirs = append(ours, mine), append(theirs, other)
		}
	}
	each, err := n.crowd(ctx, crowd)
	if err != nil {
		return err
	}
	fmt.Printf("| driver %s, accelerator %s, %d MiB, %d boots of each in turns; p50 / p95 in ms | Tripod | QEMU by hand | Tripod : by hand |\n|---|---:|---:|---:|\n", b.driver, b.accel, b.memory>>20, rounds)
	ready := func(l life) time.Duration { return l.ready }
	fmt.Printf("| guest ready after its start | %s | %s | %.2f |\n", spread(ours, ready), spread(theirs, ready), ratio(ours, theirs, ready))
	fmt.Printf("| guest ready after RunPodSandbox (network, disks and all) | %s | | |\n",
		spread(ours, func(l life) time.Duration { return l.whole }))
	cpu := func(l life) time.Duration { return l.cpu }
	fmt.Printf("| processor time of QEMU until then | %s | %s | %.2f |\n", spread(ours, cpu), spread(theirs, cpu), ratio(ours, theirs, cpu))
	off := func(l life) time.Duration { return l.off }
	fmt.Printf("| StopContainer; power button to power-off | %s | %s | %+.0f ms |\n", spread(ours, off), spread(theirs, off),
		ms(median(ours, off)-median(theirs, off)))
	fmt.Printf("\n| MiB (median) | Tripod | QEMU by hand |\n|---|---:|---:|\n")
	fmt.Printf("| QEMU, resident beyond the guest's memory | %.0f | %.0f |\n", mebi(ours, func(l life) uint64 { return l.rest }),
		mebi(theirs, func(l life) uint64 { return l.rest }))
	fmt.Printf("| the guest's memory, resident | %.0f | %.0f |\n", mebi(ours, func(l life) uint64 { return l.ram }),
		mebi(theirs, func(l life) uint64 { return l.ram }))
	if n.daemon != 0 {
		fmt.Printf("| the daemon's growth for each machine (%d at a time) | %.1f | |\n", crowd, float64(each)/(1<<20))
	}
	return nil
}

func sorted[T cmp.Ordered](all []life, of func(life) T) []T {
	var values []T
	for _, l := range all {
		values = append(values, of(l))
	}
	slices.Sort(values)
	return values
}

func median[T cmp.Ordered](all []life, of func(life) T) T { return sorted(all, of)[len(all)/2] }

func spread(all []life, of func(life) time.Duration) string {
	d := sorted(all, of)
	return fmt.Sprintf("%.0f / %.0f", ms(d[len(d)/2]), ms(d[min(len(d)-1, len(d)*95/100)]))
}

func ratio(a, b []life, of func(life) time.Duration) float64 {
	return float64(median(a, of)) / float64(median(b, of))
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func mebi(all []life, of func(life) uint64) float64 { return float64(median(all, of)) / (1 << 20) }
