package machinetest

import "testing"

// balloon takes memory from a running guest and gives it back. The driver restarts in between.
func balloon(t *testing.T, s Subject) {
	l, d := s.Begin(t), s.Definition(t)
	l.mustDefine(t, d)
	l.Boot(t, d)
	less := d.Memory - 32<<20
	must(t, l.SetMemory(t.Context(), d.Name, less))
	checkBalloon(t, l, d.Name, less)
	l.Close()
	l = s.Begin(t, d.Name)
	defer l.Close()
	checkBalloon(t, l, d.Name, less)
	must(t, l.SetMemory(t.Context(), d.Name, less))
	must(t, l.SetMemory(t.Context(), d.Name, d.Memory))
	checkBalloon(t, l, d.Name, d.Memory)
	must(t, l.Undefine(t.Context(), d.Name))
}

func checkBalloon(t *testing.T, l *Life, name string, want uint64) {
	t.Helper()
	figures, err := l.Stats(t.Context(), name)
	if err != nil || figures.Memory != want {
		t.Errorf("Stats: Memory = %d, error %v, want %d", figures.Memory, err, want)
	}
}
