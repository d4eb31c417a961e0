package vm

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestC10ConsoleIsBounded: what a guest says while the daemon is away takes no more than the console's buffer, and nothing of the
// node's disk or of /run. The daemon that is back logs what there was room for, says that something is missing, and goes on.
func TestC10ConsoleIsBounded(t *testing.T) {
	const room = 1 << 20
	r := newRig(t, func(c *settings) { c.VM.ConsoleBuffer = room })
	p, c := r.run("floods", "disk")
	r.eventually("the first line", func() bool { return strings.Contains(r.log(p), "booted") })
	other := r.pod("neighbour")
	r.part()
	g := r.driver.guest(c.ID)
	var err error
	lines := 0
	for ; err == nil; lines++ {
		if lines > 16*room/100 {
			t.Fatal("the console accepts output without a bound")
		}
		err = say(&g, fmt.Sprintf("%099d\n", lines))
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	var st unix.Stat_t
	r.must(unix.Stat(g.definition.SerialLog, &st))
	if taken := st.Blocks * 512; taken > room || taken < room/2 {
		t.Errorf("the serial log takes %d bytes, of %d", taken, room)
	}
	r.open()
	r.eventually("the loss", func() bool { return strings.Contains(r.log(p), "stderr F "+"tripod: the console said more") })
	r.eventually("room", func() bool { return say(&g, "\nand goes on\n") == nil })
	r.eventually("what came then", func() bool { return strings.Contains(r.log(p), "stdout F and goes on") })
	log := r.log(p)
	if n := strings.Count(log, "tripod: the console said more"); n != 1 {
		t.Errorf("the loss is noted %d times", n)
	}
	logged := map[string]bool{}
	for line := range strings.Lines(log) {
		_, text, _ := strings.Cut(line, "stdout F ")
		logged[text] = true
	}
	for i := range lines - 1 {
		if !logged[fmt.Sprintf("%099d\n", i)] {
			t.Fatalf("line %d of %d, which there was room for, is not in the log", i, lines)
		}
	}
	next := r.create(other, "disk")
	r.must(r.StartContainer(r.ctx(), other, next))
	if _, err := os.Stat(r.config.serialDir(c.ID)); err != nil {
		t.Error(err)
	}
	r.must(r.StopContainer(r.ctx(), p, c, 0))
	r.must(r.RemoveContainer(r.ctx(), p, c))
	if _, err := os.Stat(r.config.serialDir(c.ID)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after the removal: %v", err)
	}
}
