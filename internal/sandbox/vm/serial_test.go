package vm

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestC10ConsoleIsBounded: a guest's output while the daemon is down takes no more space than the console's buffer, and
// none on the node's disk or /run. The next daemon logs the buffered output, says that some is missing, and continues.
func TestC10ConsoleIsBounded(t *testing.T) {
	const room = 1 << 20
	r := newRig(t, func(c *settings) { c.VM.ConsoleBuffer = room })
	p, c := r.run("floods", "disk")
	r.eventually("the first line", func() bool { return strings.Contains(r.log(p), "booted") })
	other := r.pod("neighbour")
	r.stop()
	g := r.driver.guest(c.ID)
	var err error
	lines := 0
	for ; err == nil; lines++ {
		if lines > 16*room/100 {
			t.Fatal("the console's buffer has no limit")
		}
		err = say(&g, fmt.Sprintf("%099d\n", lines))
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("writing to the full console: error = %v, want ENOSPC", err)
	}
	var st unix.Stat_t
	r.must(unix.Stat(g.definition.SerialLog, &st))
	if taken := st.Blocks * 512; taken > room || taken < room/2 {
		t.Errorf("the serial log takes %d bytes, want between %d and %d", taken, room/2, room)
	}
	r.open()
	const loss = "tripod: the console's output could not be logged"
	r.eventually("the loss", func() bool { return strings.Contains(r.log(p), "stderr F "+loss) })
	r.eventually("room", func() bool { return say(&g, "\nand goes on\n") == nil })
	r.eventually("later output", func() bool { return strings.Contains(r.log(p), "stdout F and goes on") })
	log := r.log(p)
	if n := strings.Count(log, loss); n != 1 {
		t.Errorf("the loss is noted %d times, want once", n)
	}
	logged := map[string]bool{}
	for line := range strings.Lines(log) {
		_, text, _ := strings.Cut(line, "stdout F ")
		logged[text] = true
	}
	for i := range lines - 1 {
		if !logged[fmt.Sprintf("%099d\n", i)] {
			t.Fatalf("buffered line %d of %d is not in the log", i, lines)
		}
	}
	next := r.create(other, "disk")
	r.must(r.StartContainer(r.ctx(), other, next))
	if _, err := os.Stat(r.config.serialDir(c.ID)); err != nil {
		t.Errorf("the serial directory while another machine starts: %v", err)
	}
	r.must(r.StopContainer(r.ctx(), p, c, 0))
	r.must(r.RemoveContainer(r.ctx(), p, c))
	if _, err := os.Stat(r.config.serialDir(c.ID)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Stat(serial directory) after the removal: error = %v, want ErrNotExist", err)
	}
}
