package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"
)

// topModel is the state of the full-screen view: the newest sample, how it is sorted, and which part is visible.
type topModel struct {
	ctx           context.Context
	sampler       *sampler
	interval      time.Duration
	by            order
	reverse       bool
	loads         []load
	err           error // of the newest sample
	width, height int
	offset        int // first visible pod
}

// sampled is the message with a finished sample.
type sampled struct {
	loads []load
	err   error
}

// due is the message that the next sample is due.
type due struct{}

// topView runs the view until the user quits.
func (a *App) topView(ctx context.Context, s *sampler, interval time.Duration, by order) error {
	m := topModel{ctx: ctx, sampler: s, interval: interval, by: by}
	_, err := tea.NewProgram(m, tea.WithContext(ctx), tea.WithInput(a.Stdin), tea.WithOutput(a.Stdout)).Run()
	if errors.Is(err, tea.ErrInterrupted) || ctx.Err() != nil {
		return nil
	}
	return err
}

func (m topModel) Init() tea.Cmd { return m.take }

// take takes a sample.
func (m topModel) take() tea.Msg {
	loads, err := m.sampler.sample(m.ctx)
	return sampled{loads, err}
}

func (m topModel) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case sampled:
		// After an error the last figures stay visible: the node may be restarting.
		if m.err = msg.err; m.err == nil {
			m.loads = msg.loads
		}
		return m.scroll(0), tea.Tick(m.interval, func(time.Time) tea.Msg { return due{} })
	case due:
		return m, m.take
	case tea.KeyPressMsg:
		return m.press(msg.String())
	}
	return m.scroll(0), nil
}

func (m topModel) press(key string) (tea.Model, tea.Cmd) {
	switch key {
	case "q", "esc", "ctrl+c":
		return m, tea.Quit
	case "up":
		return m.scroll(-1), nil
	case "down":
		return m.scroll(1), nil
	case "pgup":
		return m.scroll(-m.rows()), nil
	case "pgdown":
		return m.scroll(m.rows()), nil
	}
	if i := slices.IndexFunc(orders, func(o order) bool { return o.key == key }); i >= 0 {
		m.reverse = orders[i].name == m.by.name && !m.reverse
		m.by = orders[i]
	}
	return m, nil
}

// scroll moves the visible part by a number of pods, at most to the ends of the list.
func (m topModel) scroll(by int) topModel {
	m.offset = max(min(m.offset+by, len(m.loads)-m.rows()), 0)
	return m
}

// rows returns how many pods fit on the screen, below the summary, an empty line and the header.
func (m topModel) rows() int { return max(m.height-3, 1) }

func (m topModel) View() tea.View {
	v := tea.NewView(strings.Join(m.lines(time.Now()), "\n"))
	v.AltScreen = true
	return v
}

// lines returns the lines of the screen, cut to its width.
func (m topModel) lines(now time.Time) []string {
	table := strings.Split(strings.TrimSuffix(string(renderLoads(m.by.sorted(m.loads, m.reverse), now)), "\n"), "\n")
	visible := table[1:][min(m.offset, len(m.loads)):]
	lines := append([]string{m.summary(), "", table[0]}, visible[:min(m.rows(), len(visible))]...)
	for i, line := range lines {
		if runes := []rune(line); m.width > 0 && len(runes) > m.width {
			lines[i] = string(runes[:m.width])
		}
	}
	return lines
}

func (m topModel) summary() string {
	ready, cores, memory := 0, 0.0, uint64(0)
	for _, l := range m.loads {
		ready += boolInt(l.ready)
		cores += max(l.cores, 0)
		memory += l.memory
	}
	text := fmt.Sprintf("%d pods, %d ready; CPU %.1f %%, memory %s; sorted by %s (c m r t n k s a), q quits", len(m.loads), ready, cores*100,
		size(memory), m.by.name)
	if m.err != nil {
		return fmt.Sprintf("the figures are old: %s", Explain(m.err))
	}
	return text
}
