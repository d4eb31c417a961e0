package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

func TestParseChannels(t *testing.T) {
	for text, want := range map[string]channelField{
		"in=app/in:r":              {"in", "app/in", "r"},
		"out=app/out:w:1":          {"out", "app/out", "w:1"},
		"both=a:rw:2":              {"both", "a", "rw:2"},
		"plain=app/x":              {"plain", "app/x", "rw"},
		"all=app/#":                {"all", "app/#", "r"},
		"own=$SL/proc/stdio:w:0":   {"own", "$SL/proc/stdio", "w"},
		"colon=urn:x:y":            {"colon", "urn:x:y", "rw"},
		"colon=urn:x:y:r:1":        {"colon", "urn:x:y", "r:1"},
		"equals=a=b:w":             {"equals", "a=b", "w"},
		"stdout=sensors/t/log:w:2": {"stdout", "sensors/t/log", "w:2"},
	} {
		got, err := parseChannels([]string{text})
		if err != nil || len(got) != 1 || got[0] != want {
			t.Errorf("parseChannels(%s) = %+v, %v; want %+v", text, got, err, want)
		}
	}
	for _, bad := range []string{"", "in", "=topic", "in=", "a/b=topic", "in=app/#:w", "in=app/#:rw", "in=a/b#:r", "in=:r"} {
		if got, err := parseChannels([]string{bad}); !errdefs.IsInvalidArgument(err) {
			t.Errorf("parseChannels(%q) = %+v, %v; want invalid argument", bad, got, err)
		}
	}
	if _, err := parseChannels([]string{"in=a", "in=b"}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("parseChannels with a name twice: got error %v, want invalid argument", err)
	}
}

func TestModuleData(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	if err := os.WriteFile(filepath.Join(dir, "upper.wasm"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	m := edgeModule{runtime: "wasm", channels: []string{"in=app/in:r:1"}, env: []string{"A=b"}, dirs: []string{"/srv"}, restart: "always"}
	data, err := m.data([]string{"upper.wasm", "-v", "x"})
	if err != nil {
		t.Fatal(err)
	}
	if data.File() != filepath.Join(dir, "upper.wasm") || data.Image() != "" || data.Name() != "upper" || data.Parent() != "wasm" ||
		data.UUID() == "" || data.Restart() != "always" {
		t.Errorf("data: got %s, want the module of the flags", data.Bytes())
	}
	if got := data.Args(); !reflect.DeepEqual(got, []string{"upper", "-v", "x"}) {
		t.Errorf("args: got %q, want upper, -v and x", got)
	}
	if got := data.Channels(); !reflect.DeepEqual(got, []channel.Channel{{Name: "in", Topic: "app/in", Flags: channel.Read | channel.QoS1}}) {
		t.Errorf("channels: got %+v, want the channel in", got)
	}
	image, err := (edgeModule{restart: "never"}).data([]string{"registry.example/mods/relay@sha256:" + strings.Repeat("0", 64)})
	if err != nil || image.Image() == "" || image.File() != "" || image.Name() != "relay" {
		t.Errorf("data of an image: got %s, %v; want the image relay", image.Bytes(), err)
	}
	for _, bad := range []edgeModule{{restart: "sometimes"}, {restart: "never", env: []string{"A"}}, {restart: "never", uuid: "a/b"}} {
		if data, err := bad.data([]string{"/x.wasm"}); err == nil {
			t.Errorf("data of %+v: got %s, want an error", bad, data.Bytes())
		}
	}
}

func TestModuleWatch(t *testing.T) {
	topics := wire.Topics{Realm: "realm"}
	watch := func() *moduleWatch {
		w := newModuleWatch(topics, "object", "module")
		w.file = "/home/x.wasm"
		return w
	}
	exited := func(status string) mqtt.Message {
		return mqtt.Message{Topic: topics.ControlOf("rt"),
			Payload: []byte(`{"object_id":"x","action":"exited","type":"arts_req","data":{"type":"module","uuid":"module","status":` + status +
				`}}`)}
	}
	for name, test := range map[string]struct {
		message mqtt.Message
		done    bool
		want    string // in the error
	}{
		"it runs": {mqtt.Message{Topic: topics.Reported("rt"),
			Payload: []byte(`{"modules":[{"uuid":"other","state":"running"},{"uuid":"module","state":"running"}]}`)}, true, ""},
		"it is pending": {mqtt.Message{Topic: topics.Reported("rt"), Payload: []byte(`{"modules":[{"uuid":"module","state":"pending"}]}`)},
			false, ""},
		"no report":     {mqtt.Message{Topic: topics.Reported("rt"), Payload: []byte("x")}, false, ""},
		"done already":  {exited(`{"code":0,"reason":"exited"}`), true, ""},
		"a public exit": {exited(`"exited"`), true, ""},
		"failed":        {exited(`{"code":125,"reason":"exited","message":"no such file"}`), true, "exited, code 125, no such file"},
		"its file is missing": {exited(`{"code":125,"reason":"exited","message":"file: /home/x.wasm: no such file"}`), true,
			"a path on the module's node, below one of its edge.module_roots"},
		"of another": {mqtt.Message{Topic: topics.ControlOf("rt"),
			Payload: []byte(`{"action":"exited","type":"arts_req","data":{"uuid":"other"}}`)}, false, ""},
		"the create itself": {mqtt.Message{Topic: topics.ControlOf("rt"),
			Payload: []byte(`{"action":"create","type":"arts_req","data":{"uuid":"module"}}`)}, false, ""},
		"junk": {mqtt.Message{Topic: topics.ControlOf("rt"), Payload: []byte(`{`)}, false, ""},
		"refused": {mqtt.Message{Topic: topics.Errors(),
			Payload: []byte(`{"object_id":"y","action":"error","type":"arts_resp","data":{"desc":"unknown parent","data":{"uuid":"module"}}}`)},
			true, "unknown parent"},
		"refused by object": {mqtt.Message{Topic: topics.Errors(),
			Payload: []byte(`{"object_id":"object","action":"error","type":"arts_resp","data":{"desc":"bad"}}`)}, true, "bad"},
		"another's refusal": {mqtt.Message{Topic: topics.Errors(),
			Payload: []byte(`{"object_id":"y","action":"error","type":"arts_resp","data":{"desc":"bad","data":{"uuid":"other"}}}`)}, false, ""},
	} {
		done, err := watch().handle(test.message)
		if done != test.done || (err != nil) != (test.want != "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: handle = %v, %v; want %v and an error with %q", name, done, err, test.done, test.want)
		}
	}
}

// edge runs `tripod edge ARGS` in this process and returns its standard output.
func edge(t *testing.T, args ...string) (string, error) {
	t.Helper()
	out, _, err := edgeNotes(t, args...)
	return out, err
}

// edgeNotes is like edge, and returns the standard error, too.
func edgeNotes(t *testing.T, args ...string) (out, notes string, err error) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	c := (&App{Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: &stderr}).EdgeCommand(func(*cobra.Command) {})
	c.SilenceErrors, c.SilenceUsage = true, true
	c.SetOut(&stdout)
	c.SetErr(&stderr)
	c.SetArgs(args)
	err = c.ExecuteContext(context.Background())
	return stdout.String(), stderr.String(), err
}

// closed returns the address of a closed port.
func closed(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func TestUnreachableServers(t *testing.T) {
	none := closed(t)
	for _, args := range [][]string{{"run", "/x.wasm"}, {"pub", "a", "b"}, {"sub", "a"}} {
		if _, err := edge(t, append(args, "--broker", "mqtt://"+none)...); err == nil ||
			!strings.Contains(err.Error(), "no broker answers at mqtt://"+none) {
			t.Errorf("%v without a broker: got error %v", args, err)
		}
	}
	for _, args := range [][]string{{"ps"}, {"runtimes"}, {"logs", "-f", "m"}} {
		if _, err := edge(t, append(args, "--orchestrator", "http://"+none)...); err == nil ||
			!strings.Contains(err.Error(), "no orchestrator answers at http://"+none) {
			t.Errorf("%v without an orchestrator: got error %v", args, err)
		}
	}
	for _, args := range [][]string{{"pub", "a", "b", "--broker", "tcp://h"}, {"pub", "a/#", "b"}, {"pub", "a", "b", "--qos", "3"},
		{"sub", "a#"}, {"ps", "--orchestrator", "host"}, {"logs", "-f", "-p", "m"}, {"logs", "--tail", "-1", "m"}} {
		if _, err := edge(t, args...); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%v: got error %v, want invalid argument", args, err)
		}
	}
}

func TestEdgeLists(t *testing.T) {
	modules := []string{
		`{"type":"module","uuid":"m-1","name":"a","parent":"rt-1","status":"A","filename":"/srv/a.wasm","extra":1.0,"apis":["wasi","aot"],"since":"2026-01-31T12:00:00Z"}`,
		`{"type":"module","uuid":"m-2","name":"b","parent":{"uuid":"rt-1"},"status":"Q","image":"reg/b@sha256:0"}`,
		`{"type":"module","uuid":"m-3","name":"c","parent":"rt-1","status":"D","file":"/srv/c.wasm","exit":{"status":{"code":134,"reason":"trap","message":"unreachable"}}}`,
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/modules/{$}", func(w http.ResponseWriter, r *http.Request) { // two a page
		if r.URL.Query().Get("dead") != "1" {
			t.Errorf("the query %s asks for no dead modules", r.URL.RawQuery)
		}
		start := 0
		_, _ = fmt.Sscan(r.URL.Query().Get("start"), &start)
		page := modules[start:min(start+2, len(modules))]
		fmt.Fprintf(w, `{"count":%d,"start":%d,"results":[%s]}`, len(modules), start, strings.Join(page, ","))
	})
	mux.HandleFunc("GET /api/modules/c/", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, modules[2]) })
	mux.HandleFunc("GET /api/runtimes/{$}", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"count":1,"start":0,"results":[{"uuid":"rt-1","name":"wasm","status":"A","runtime_type":"tripod/wasm","parent":"mgr-1","since":5,"apis":["wasi"],"max_nmodules":128}]}`)
	})
	server := httptest.NewServer(mux)
	defer server.Close()
	out, err := edge(t, "ps", "--orchestrator", server.URL)
	if err != nil || !strings.Contains(out, "/srv/a.wasm") || !strings.Contains(out, "queued") || strings.Contains(out, "m-3") {
		t.Errorf("ps: got error %v and\n%s\nwant the modules that are not dead", err, out)
	}
	out, err = edge(t, "ps", "-a", "--orchestrator", server.URL)
	if err != nil || !strings.Contains(out, "trap, code 134, unreachable") {
		t.Errorf("ps -a: got error %v and\n%s\nwant the exit of the dead module", err, out)
	}
	out, err = edge(t, "ps", "c", "-o", "json", "--orchestrator", server.URL)
	var records []map[string]any
	if err != nil || json.Unmarshal([]byte(out), &records) != nil || len(records) != 1 || records[0]["status"] != "D" {
		t.Errorf("ps c -o json: got error %v and\n%s\nwant the dead module", err, out)
	}
	if out, err = edge(t, "ps", "-q", "--orchestrator", server.URL); err != nil || out != "m-1\nm-2\n" {
		t.Errorf("ps -q: got error %v and\n%s\nwant m-1 and m-2", err, out)
	}
	if _, err = edge(t, "ps", "nobody", "--orchestrator", server.URL); !errdefs.IsNotFound(err) ||
		!strings.Contains(err.Error(), `no module has the uuid or the name "nobody"`) {
		t.Errorf("ps nobody: got error %v, want not found", err)
	}
	out, err = edge(t, "runtimes", "--orchestrator", server.URL)
	if err != nil || !strings.Contains(out, "tripod/wasm") || !strings.Contains(out, "1/128") {
		t.Errorf("runtimes: got error %v and\n%s\nwant tripod/wasm with 1/128", err, out)
	}
	out, err = edge(t, "ps", "-o", "wide", "--orchestrator", server.URL)
	if err != nil || !strings.Contains(out, "SINCE") || !strings.Contains(out, "wasi,aot") {
		t.Errorf("ps -o wide: got error %v and\n%s\nwant the APIs", err, out)
	}
	out, err = edge(t, "runtimes", "-o", "wide", "--orchestrator", server.URL)
	if err != nil || !strings.Contains(out, "mgr-1") {
		t.Errorf("runtimes -o wide: got error %v and\n%s\nwant the manager", err, out)
	}
	if _, err = edge(t, "ps", "-o", "xml", "--orchestrator", server.URL); !errdefs.IsInvalidArgument(err) {
		t.Errorf("ps -o xml: got error %v, want invalid argument", err)
	}
	out, err = edge(t, "__complete", "stop", "--orchestrator", server.URL, "")
	if err != nil || !strings.Contains(out, "m-1") || strings.Contains(out, "m-3") {
		t.Errorf("completion: got error %v and\n%s\nwant m-1 without m-3", err, out)
	}
}
