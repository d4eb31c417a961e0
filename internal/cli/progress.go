package cli

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/term"
)

// progressInterval is the time between two lines of progress where no terminal shows a bar.
const progressInterval = 5 * time.Second

// progress shows how much of a transfer is done: as a bar on a terminal, otherwise as a line every few seconds. Its
// methods must not be called concurrently.
type progress struct {
	what    string
	out     io.Writer
	started time.Time
	lineAt  time.Time // of the last line

	bars *mpb.Progress // nil without a terminal
	bar  *mpb.Bar
}

// newProgress begins to show the progress of what on the standard error. The caller must call end.
func (a *App) newProgress(what string) *progress {
	p := &progress{what: what, out: a.Stderr, started: time.Now(), lineAt: time.Now()}
	if f, ok := a.Stderr.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		p.showBar(mpb.WithOutput(f))
	}
	return p
}

func (p *progress) showBar(options ...mpb.ContainerOption) {
	p.bars = mpb.New(append(options, mpb.WithRefreshRate(200*time.Millisecond))...)
	p.bar = p.bars.AddBar(0, mpb.BarWidth(30), mpb.PrependDecorators(decor.Name(p.what)),
		mpb.AppendDecorators(decor.Any(func(s decor.Statistics) string { return p.text(s.Current, s.Total) })))
}

// set shows that done of total bytes have been transferred. The total is 0 until it is known.
func (p *progress) set(done, total int64) {
	if p.bar != nil {
		p.bar.SetTotal(total, false)
		p.bar.SetCurrent(done)
		return
	}
	if now := time.Now(); now.Sub(p.lineAt) >= progressInterval {
		p.lineAt = now
		fmt.Fprintf(p.out, "%s: %s\n", p.what, p.text(done, total))
	}
}

// text formats the number of bytes and the average rate.
func (p *progress) text(done, total int64) string {
	text := size(uint64(done))
	if total > 0 {
		text += " of " + size(uint64(total))
	}
	if seconds := time.Since(p.started).Seconds(); seconds >= 1 {
		text += ", " + size(uint64(float64(done)/seconds)) + "/s"
	}
	return text
}

// end ends the bar. It disappears after an error, and if there was nothing to transfer.
func (p *progress) end(err error) {
	if p.bar == nil {
		return
	}
	if err != nil || p.bar.Current() == 0 {
		p.bar.Abort(true)
	} else {
		p.bar.SetTotal(-1, true)
	}
	p.bars.Wait()
}
