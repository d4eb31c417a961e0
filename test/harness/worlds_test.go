package harness

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestWorlds has a script for a test binary: it lists five tests, notes each that it is to run, and fails one.
func TestWorlds(t *testing.T) {
	ran := filepath.Join(t.TempDir(), "ran")
	self := filepath.Join(t.TempDir(), "self")
	script := `#!/bin/sh
for arg; do case $arg in
-test.list=*) printf 'TestA\nTestB\nTestC\nTestD\nTestE\n'; exit ;;
-test.run=*) run=$arg ;; # the last one counts
-test.testlogfile=*) log=${arg#*=} ;;
esac; done
echo "$run" >>` + ran + `
printf '# test log\ngetenv %s\n' "$run" >"$log"
case $run in *TestD*) exit 3 ;; esac
`
	if err := os.WriteFile(self, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	log, args := filepath.Join(t.TempDir(), "testlog"), os.Args
	os.Args = []string{self, "-test.testlogfile=" + log}
	defer func() { os.Args = args }()
	if code := runWorlds(self, 3); code != 3 {
		t.Errorf("exit code %d, want 3, that of the world that failed", code)
	}
	out, err := os.ReadFile(ran)
	if err != nil {
		t.Fatal(err)
	}
	got := strings.Fields(string(out))
	slices.Sort(got)
	want := []string{"-test.run=^(TestA|TestD)$", "-test.run=^(TestB|TestE)$", "-test.run=^(TestC)$"}
	if !slices.Equal(got, want) {
		t.Errorf("the worlds ran %q, want %q", got, want)
	}
	text, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	all := "# test log\n"
	for _, names := range want {
		all += "chdir " + dir + "\ngetenv " + names + "\n"
	}
	if string(text) != all {
		t.Errorf("the log of the worlds is %q, want %q", text, all)
	}
}

// TestDivide: the longest tests come first, each to the world that has least to do.
func TestDivide(t *testing.T) {
	seconds := map[string]float64{"TestLong": 10, "TestMiddle": 6, "TestHalf": 5, "TestShort": 0.5}
	got := divide([]string{"TestShort", "TestNew", "TestHalf", "TestMiddle", "TestLong"}, seconds, 2)
	want := [][]string{{"TestLong", "TestNew", "TestShort"}, {"TestMiddle", "TestHalf"}}
	if !slices.EqualFunc(got, want, slices.Equal[[]string]) {
		t.Errorf("divide = %q, want %q", got, want)
	}
}

func TestWorldsOfASelection(t *testing.T) {
	t.Setenv(envWorlds, "3")
	t.Setenv("TRIPOD_BIN", "tripod")
	args := os.Args
	defer func() { os.Args = args }()
	for _, c := range []struct {
		args []string
		want int
	}{
		{[]string{"e2e.test", "-test.timeout=40m0s", "-test.v=true"}, 3},
		{[]string{"e2e.test", "-test.run=TestLogs"}, 1},
		{[]string{"e2e.test", "-test.bench", "."}, 1},
	} {
		os.Args = c.args
		if got, err := worlds(); err != nil || got != c.want {
			t.Errorf("worlds() with the arguments %q = %d, %v; want %d", c.args, got, err, c.want)
		}
	}
	t.Setenv(envWorlds, "none")
	os.Args = args[:1]
	if _, err := worlds(); err == nil {
		t.Error("worlds() took a number that is none")
	}
}
