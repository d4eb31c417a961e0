package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestPick(t *testing.T) {
	all := []named{{"abc1", "web"}, {"abc2", "db"}, {"def", "web"}, {"ab", "x"}}
	for _, test := range []struct{ arg, want, err string }{
		{"abc1", "abc1", ""},
		{"ab", "ab", ""}, // a full ID takes precedence over prefixes
		{"de", "def", ""},
		{"db", "abc2", ""},
		{"abc", "", `"abc" matches 2`},
		{"web", "", `"web" matches 2 pods: abc1, def`},
		{"zz", "", `no pod has the ID or the name "zz"`},
		{"", "", "empty"},
	} {
		got, err := pick("pod", test.arg, all)
		if got != test.want || (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
			t.Errorf("pick(%q) = %q, %v; want %q and an error with %q", test.arg, got, err, test.want, test.err)
		}
	}
}

func TestExplain(t *testing.T) {
	st := status.Error(codes.NotFound, "container abc: not found")
	for _, test := range []struct {
		err  error
		want string
	}{
		{errors.New("plain"), "plain"},
		{st, "container abc: not found"},
		{fmt.Errorf("while looking: %w", st), "while looking: container abc: not found"},
		{status.Error(codes.Unimplemented, "CheckpointPod"), "not implemented by this runtime: CheckpointPod"},
		{status.Error(codes.DeadlineExceeded, "context deadline exceeded"), "took longer than allowed (--timeout): context deadline exceeded"},
	} {
		if got := Explain(test.err); got != test.want {
			t.Errorf("Explain(%v) = %q, want %q", test.err, got, test.want)
		}
	}
}

func TestExitCode(t *testing.T) {
	for want, err := range map[int]error{0: nil, 1: errors.New("x"), 7: fmt.Errorf("wrapped: %w", &ExitError{Code: 7})} {
		if got := ExitCode(err); got != want {
			t.Errorf("ExitCode(%v) = %d, want %d", err, got, want)
		}
	}
}

func TestTableKeepsItsShape(t *testing.T) {
	var out bytes.Buffer
	table := newTable(&out, "ID", "NAME")
	table.row("1", "tab\there\nand a line")
	table.row("22", "\x1b[31mred")
	if err := table.flush(); err != nil {
		t.Fatal(err)
	}
	want := "ID   NAME\n1    tab?here?and a line\n22   ?[31mred\n"
	if out.String() != want {
		t.Errorf("table: got\n%q\nwant\n%q", out.String(), want)
	}
}

func TestPrintFormats(t *testing.T) {
	msg := &runtimeapi.ListImagesResponse{Images: []*runtimeapi.Image{{Id: "sha256:1", RepoTags: []string{"a:b"}, Size: 5}}}
	for format, want := range map[string]string{"json": `"id": "sha256:1"`, "yaml": "- id: sha256:1", "table": "people false",
		"wide": "people true"} {
		var out bytes.Buffer
		a := &App{Stdout: &out, format: format}
		err := a.Print(msg, func(wide bool) error { _, err := fmt.Fprint(&out, "people ", wide); return err })
		if format == "yaml" {
			want = "id: sha256:1"
		}
		if err != nil || !strings.Contains(out.String(), want) {
			t.Errorf("print as %s: got %s, %v; want %s", format, out.String(), err, want)
		}
	}
	var out bytes.Buffer
	if err := (&App{Stdout: &out}).Print(msg, nil); err != nil || !strings.HasPrefix(out.String(), "{") {
		t.Errorf("Print without a table: got %s, %v; want JSON", out.String(), err)
	}
	for format, want := range map[string]string{"json": "{\"a\":\"<&\"}\n{\"a\":\"<&\"}\n", "yaml": "---\na: <&\n---\na: <&\n"} {
		out.Reset()
		a := &App{Stdout: &out, format: format}
		for range 2 {
			if err := a.printItem(map[string]string{"a": "<&"}); err != nil {
				t.Fatal(err)
			}
		}
		if out.String() != want {
			t.Errorf("stream as %s: got %q, want %q", format, out.String(), want)
		}
	}
}

// TestOutputFlag: a wrong format is an error before the command runs, and the shell completes the right ones.
func TestOutputFlag(t *testing.T) {
	for _, command := range []string{"pods", "events", "inspect", "pull"} {
		_, err := runCommand(t, command, "x", "-o", "xml")
		if !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s -o xml: got error %v, want invalid argument", command, err)
		}
		out, err := runCommand(t, "__complete", command, "-o", "")
		if err != nil || !strings.Contains(out, "yaml\n") {
			t.Errorf("completion of %s -o: got error %v and\n%s\nwant yaml", command, err, out)
		}
	}
}

// runCommand runs a command of the package and returns its output.
func runCommand(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	err := runCommandIn(t.Context(), &out, args...)
	return out.String(), err
}

// runCommandIn runs a command of the package, whose two outputs are one.
func runCommandIn(ctx context.Context, out *bytes.Buffer, args ...string) error {
	return runApp(ctx, &App{Stdout: out, Stderr: out}, args...)
}

// runApp runs a command of the package with these streams.
func runApp(ctx context.Context, app *App, args ...string) error {
	root := &cobra.Command{Use: "tripod", SilenceErrors: true, SilenceUsage: true}
	root.AddGroup(&cobra.Group{ID: Group})
	root.AddCommand(app.Commands()...)
	root.SetOut(app.Stdout)
	root.SetErr(io.Discard)
	root.SetArgs(args)
	return root.ExecuteContext(ctx)
}

// TestStatusInOrder checks that verbose answers begin with the status and that info, JSON in strings, is expanded.
func TestStatusInOrder(t *testing.T) {
	msg := &runtimeapi.ContainerStatusResponse{
		Status: &runtimeapi.ContainerStatus{Id: "x"},
		Info:   map[string]string{"info": `{"pid":7}`, "text": "not JSON"},
	}
	document, err := jsonOf(msg)
	if err != nil {
		t.Fatal(err)
	}
	text := string(document)
	if !strings.HasPrefix(text, `{"status":`) || !strings.Contains(text, `"info":{"info":{"pid":7},"text":"not JSON"}`) {
		t.Errorf("got JSON %s, want the status first and the info expanded", text)
	}
}

func TestWords(t *testing.T) {
	hex := strings.Repeat("0123456789abcdef", 4)
	for in, want := range map[string]string{hex: "0123456789abc", "sha256:" + hex: "0123456789abc",
		"example.com:foo.Bar@1.2.3#0": "example.com:foo.Bar@1.2.3#0", "": ""} {
		if got := shortID(in); got != want {
			t.Errorf("shortID(%q) = %q, want %q", in, got, want)
		}
	}
	for in, want := range map[uint64]string{0: "0B", 999: "999B", 1000: "1kB", 2906556: "2.91MB", 999_999: "1MB", 1 << 40: "1.1TB",
		1<<64 - 1: "18.4EB"} {
		if got := size(in); got != want {
			t.Errorf("size(%d) = %q, want %q", in, got, want)
		}
	}
	for in, want := range map[string][2]string{"a.b:5000/c": {"a.b:5000/c", "<none>"}, "a.b:5000/c:d": {"a.b:5000/c", "d"},
		"c": {"c", "<none>"}} {
		if n, tag := splitTag(in); n != want[0] || tag != want[1] {
			t.Errorf("splitTag(%q) = %q, %q; want %q", in, n, tag, want)
		}
	}
	for in, want := range map[string]string{"docker.io/library/Busy_Box:1": "busy-box", "a@sha256:00": "a", "x/---": "pod", "": "pod"} {
		if got := nameOf(in); got != want {
			t.Errorf("nameOf(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestParsePorts(t *testing.T) {
	for text, want := range map[string]*runtimeapi.PortMapping{
		"8080:80":          {HostPort: 8080, ContainerPort: 80},
		"53:5353/udp":      {HostPort: 53, ContainerPort: 5353, Protocol: runtimeapi.Protocol_UDP},
		"127.0.0.1:8080:1": {HostIp: "127.0.0.1", HostPort: 8080, ContainerPort: 1},
		"[::1]:8080:1":     {HostIp: "::1", HostPort: 8080, ContainerPort: 1},
	} {
		got, err := parsePorts([]string{text})
		if err != nil || len(got) != 1 || got[0].String() != want.String() {
			t.Errorf("parsePorts(%s) = %v, %v; want %v", text, got, err, want)
		}
	}
	for _, bad := range []string{"80", "a:80", "80:b", "0:80", "80:65536", "80:80/icmp", ":80", "80:"} {
		if got, err := parsePorts([]string{bad}); err == nil {
			t.Errorf("parsePorts(%s) = %v, want an error", bad, got)
		}
	}
}

func TestReadMessage(t *testing.T) {
	read := func(text string) (*runtimeapi.ContainerConfig, error) {
		path := filepath.Join(t.TempDir(), "c.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		c := &runtimeapi.ContainerConfig{}
		return c, readMessage(path, c)
	}
	c, err := read(`{"metadata":{"name":"a","attempt":1},"log_path":"x","envs":[{"key":"K","value":"plain text"}],
		"linux":{"security_context":{"namespace_options":{"pid":1,"network":"NODE"}}}}`)
	if err != nil {
		t.Fatal(err)
	}
	o := c.GetLinux().GetSecurityContext().GetNamespaceOptions()
	if c.GetMetadata().GetAttempt() != 1 || c.GetLogPath() != "x" || string(c.GetEnvs()[0].GetValue()) != "plain text" ||
		o.GetPid() != runtimeapi.NamespaceMode_CONTAINER || o.GetNetwork() != runtimeapi.NamespaceMode_NODE {
		t.Errorf("readMessage: got %v, want all fields of the document", c)
	}
	if c, err := read("metadata: {name: a}\nlogPath: a.log\nenvs: [{key: K}]\n"); err != nil || c.GetLogPath() != "a.log" {
		t.Errorf("readMessage with JSON names in YAML: got %v, %v; want the log path a.log", c, err)
	}
	for text, want := range map[string]string{
		"metadata: {nam: a}":              `unknown field "nam"`,
		"- a":                             "not an object",
		"envs: [{key: K, value: 1}]":      "put it in quotes",
		"envs: [K]":                       "not an object",
		"metadata: {name: a, name: b}":    "already",
		"metadata: {attempt: many}":       "not a ContainerConfig",
		"linux: {resources: {x: {y: z}}}": "unknown field",
	} {
		if _, err := read(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("readMessage of %s: got error %v, want one with %q", text, err, want)
		}
	}
}

func TestRunConfigs(t *testing.T) {
	o := runOptions{logDir: "/logs", env: []string{"A=b=c"}, publish: []string{"1:2"}, volumes: []string{"/a:/b:ro"}}
	container, pod, err := o.configs([]string{"example.com/x/web:1", "sh", "-c", "true"})
	if err != nil {
		t.Fatal(err)
	}
	if pod.GetMetadata().GetName() != "web" || pod.GetMetadata().GetUid() == "" ||
		!strings.HasPrefix(pod.GetLogDirectory(), "/logs/default_web_") ||
		len(pod.GetPortMappings()) != 1 || container.GetArgs()[2] != "true" || container.GetCommand() != nil ||
		string(container.GetEnvs()[0].GetValue()) != "b=c" ||
		!container.GetMounts()[0].GetReadonly() || container.GetMounts()[0].GetHostPath() != "/a" ||
		container.GetMounts()[0].GetContainerPath() != "/b" {
		t.Errorf("configs: got pod %v\nand container %v", pod, container)
	}
	o.command = true
	if container, _, err = o.configs([]string{"web", "sh"}); err != nil || container.GetCommand()[0] != "sh" || container.GetArgs() != nil {
		t.Errorf("configs with --command: got %v, %v; want the command sh", container, err)
	}
	o = runOptions{entrypoint: "sh", workdir: "/srv", user: "7:8", privileged: true}
	container, pod, err = o.configs([]string{"web", "-c", "true"})
	sc := container.GetLinux().GetSecurityContext()
	if err != nil || container.GetCommand()[0] != "sh" || container.GetArgs()[0] != "-c" || container.GetWorkingDir() != "/srv" ||
		sc.GetRunAsUser().GetValue() != 7 ||
		sc.GetRunAsGroup().GetValue() != 8 || !sc.GetPrivileged() || !pod.GetLinux().GetSecurityContext().GetPrivileged() {
		t.Errorf("configs with --entrypoint, --workdir, --user and --privileged: got pod %v\nand container %v, error %v", pod, container, err)
	}
	o = runOptions{user: "www-data"}
	if container, _, err = o.configs([]string{"web"}); err != nil ||
		container.GetLinux().GetSecurityContext().GetRunAsUsername() != "www-data" {
		t.Errorf("configs with --user: got %v, %v", container, err)
	}
	for _, bad := range []string{":8", "7:staff", "7:"} {
		if _, _, err := (runOptions{user: bad}).configs([]string{"web"}); err == nil {
			t.Errorf("--user %s succeeded, want an error", bad)
		}
	}
	if _, _, err := o.configs(nil); err == nil {
		t.Error("configs without arguments succeeded, want an error")
	}
	for _, bad := range []string{"data:/b", "/a", "/a:b", "/a:/b:rw:ro", "/a:/b:z"} {
		if _, err := parseVolumes([]string{bad}); err == nil {
			t.Errorf("parseVolumes(%q) succeeded, want an error", bad)
		}
	}
}

// TestArgumentsOfRun: words after the image are the container's, with or without --, and flags may stand between.
func TestArgumentsOfRun(t *testing.T) {
	for line, want := range map[string]string{
		"web":                       "web",
		"-t web":                    "web t",
		"web -t":                    "web t",
		"web sh -c true":            "web sh -c true",
		"web -t sh -t":              "web sh -t t",
		"web -- -t sh":              "web -t sh",
		"-t web -- sh -- -d":        "web sh -- -d t",
		"a.json b.yaml -t":          "a.json b.yaml t",
		"web a.json -t":             "web a.json -t",
		"--rm web -d":               "if any flags",
		"web --nothing":             "put -- before",
		"-f a.yaml --name x":        "if any flags",
		"--wait web -- --wait -d x": "web --wait -d x",
	} {
		c := (&App{}).runCommand()
		var got []string
		c.RunE = func(c *cobra.Command, args []string) (err error) {
			got, err = argumentsOfRun(c, args)
			if tty, _ := c.Flags().GetBool("tty"); tty {
				got = append(got, "t")
			}
			return err
		}
		c.SetArgs(strings.Fields(line))
		c.SilenceErrors, c.SilenceUsage = true, true
		err := c.Execute()
		if text := strings.Join(got, " "); err == nil && text != want || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("run %s: got %q, error %v; want %q", line, text, err, want)
		}
	}
}

func TestParseSince(t *testing.T) {
	now := time.Date(2026, 1, 31, 12, 0, 0, 0, time.UTC)
	for text, want := range map[string]time.Time{"": {}, "10m": now.Add(-10 * time.Minute),
		"2026-01-31T11:00:00.5Z": now.Add(-time.Hour + time.Second/2)} {
		if got, err := parseSince(text, now); err != nil || !got.Equal(want) {
			t.Errorf("parseSince(%q) = %v, %v; want %v", text, got, err, want)
		}
	}
	if _, err := parseSince("yesterday", now); err == nil {
		t.Error("parseSince(yesterday) succeeded, want an error")
	}
}

func TestParseCreds(t *testing.T) {
	file := filepath.Join(t.TempDir(), "creds")
	if err := os.WriteFile(file, []byte("user:pass:word\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, creds := range []string{"user:pass:word", "@" + file} {
		if auth, err := parseCreds(creds); err != nil || auth.GetUsername() != "user" || auth.GetPassword() != "pass:word" {
			t.Errorf("parseCreds(%s) = %v, %v; want user and pass:word", creds, auth, err)
		}
	}
	for _, bad := range []string{"user", ":x", "@/does/not/exist"} {
		if _, err := parseCreds(bad); err == nil {
			t.Errorf("parseCreds(%s) succeeded, want an error", bad)
		}
	}
}

func TestConnectSaysWhatIsWrong(t *testing.T) {
	dead := filepath.Join(t.TempDir(), "dead.sock")
	if err := os.WriteFile(dead, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for endpoint, want := range map[string]string{
		"unix:///does/not/exist.sock": "is the node running?",
		dead:                          "no answer at unix://",
		"tcp://127.0.0.1:1":           "neither a path nor unix://PATH",
	} {
		if _, err := Connect(t.Context(), endpoint, time.Second); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Connect(%s): got error %v, want one with %q", endpoint, err, want)
		}
	}
}
