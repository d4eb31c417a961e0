package manager

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// logOf asks for a module's log and returns the answer.
func (r *rig) logOf(uuid string, more ...any) (l keptLog) {
	r.t.Helper()
	e := wire.Envelope{ObjectID: newID(), Action: wire.ActionLog, Type: wire.Request, Data: object(moduleData(uuid, more...))}
	r.publish(topics.LogRequest(runtimeA), false, e.Bytes())
	m := r.find(r.t, topics.KeptLog(runtimeA, uuid), 1, func(m mqtt.Message) bool {
		a, err := wire.ParseEnvelope(m.Payload)
		return err == nil && a.ObjectID == e.ObjectID && a.IsResponse() && a.Action == wire.ActionLog
	})
	a, _ := wire.ParseEnvelope(m.Payload)
	if err := json.Unmarshal(a.Data, &l); err != nil || l.UUID != uuid || l.Runtime != runtimeA {
		r.t.Fatalf("the answer is %s, %v", m.Payload, err)
	}
	return l
}

// TestKeptLog: the log of the last ended run can be asked for after a restart by policy, after the end, after the loss of
// the runtime, and after a restart of the daemon; that of the current run as far as it has come.
func TestKeptLog(t *testing.T) {
	r := newRig(t, nil)
	r.desire(runtimeA, 1, moduleData("again"), moduleData("once", "restart", "never"))
	r.states(runtimeA, "1", map[string]string{"again": "running", "once": "running"})
	if l := r.logOf("again", "previous", true); !strings.Contains(l.Error, "no log of an ended run") {
		t.Errorf("the previous log of a first run is %+v, want an error", l)
	}
	for _, line := range []string{"\xa8one", "two", "three\x00"} {
		r.a.tell(t, true, 0, wire.ModuleLog, line)
	}
	r.a.tell(t, true, 1, wire.ModuleLog, "last words")
	r.find(t, topics.ModuleLog(runtimeA, "once"), 1, nil)
	if l := r.logOf("again"); l.Log != "one\ntwo\nthree" || l.Ended != nil || l.Cut {
		t.Errorf("the log of a running module is %+v, want its three lines", l)
	}
	r.a.tell(t, true, 0, wire.Exited, `{"status": {"code": 1, "reason": "trap"}}`)
	r.a.tell(t, true, 1, wire.Exited, `{"status": {"code": 3, "reason": "exited"}}`)
	r.exitedOf(runtimeA, "once", 1)
	r.a.find(t, true, 0, wire.Create, 2)
	r.reported(runtimeA, func(got reported) bool {
		mod := got.module("again")
		return mod.Restarts == 1 && mod.State == "running" && got.module("once").State == reportedFinished
	})
	r.a.tell(t, true, 0, wire.ModuleLog, "second run")
	r.find(t, topics.ModuleLog(runtimeA, "again"), 4, nil)
	r.close()
	r.open()
	r.find(t, topics.Reg(runtimeA), 2, isAction(wire.ActionCreate)) // it has subscribed
	for _, previous := range []bool{true, false} {
		if l := r.logOf("once", "previous", previous); l.Log != "last words" || l.Ended == nil ||
			string(l.Exit) != `{"code":3,"reason":"exited"}` || l.Cut {
			t.Errorf("the log of an ended module is %+v, want its line and its end", l)
		}
	}
	if l := r.logOf("again", "previous", true, "tail", 2); l.Log != "two\nthree" {
		t.Errorf("the last two lines of the previous log are %q", l.Log)
	}
	r.a.find(t, true, 0, wire.Create, 3)
	r.a.tell(t, true, 0, wire.ModuleLog, "third run")
	r.find(t, topics.ModuleLog(runtimeA, "again"), 5, nil)
	r.a.kill()
	r.find(t, topics.ControlOf(runtimeA), 1, hasReason("again", "runtime-lost"))
	if l := r.logOf("again", "previous", true); l.Log != "third run" || !strings.Contains(string(l.Exit), "runtime-lost") || !l.Cut {
		t.Errorf("the log of a lost run is %+v, want its line, after a restart of the daemon", l)
	}
	for _, bad := range []string{`{`, `{"object_id":"x","action":"log","type":"arts_req","data":{"uuid":"a/b"}}`,
		`{"object_id":"x","action":"log","type":"arts_resp","data":{"uuid":"once"}}`} {
		r.publish(topics.LogRequest(runtimeA), false, []byte(bad))
	}
	r.errorWith(1)
	if l := r.logOf("nobody"); l.Error == "" {
		t.Errorf("the log of an unknown module is %+v, want an error", l)
	}
}

// TestKeptLogsAreBounded: the oldest lines of a run and the oldest files go first.
func TestKeptLogsAreBounded(t *testing.T) {
	run := newRunLog()
	for i := range 3 * keptLines {
		run.add([]byte(fmt.Sprint(i)))
	}
	text, cut := run.read(true)
	if lines := strings.Split(text, "\n"); !cut || len(lines) != keptLines || lines[0] != fmt.Sprint(2*keptLines) {
		t.Errorf("%d lines are kept, want the latest %d", len(lines), keptLines)
	}
	run.add([]byte("small"))
	run.add([]byte(strings.Repeat("x", 2*keptBytes)))
	if text, cut = run.read(true); !cut || len(text) != keptBytes-1 || text[0] != 'x' {
		t.Errorf("%d bytes are kept, want %d", len(text), keptBytes-1)
	}
	if text, cut = run.read(true); cut || text != "" {
		t.Errorf("the next run begins with %q", text)
	}
	k := &keptLogs{dir: t.TempDir()}
	for i := range keptFiles + 2 {
		uuid := fmt.Sprint(i)
		if err := k.put(keptLog{UUID: uuid, Runtime: runtimeA, Log: uuid}); err != nil {
			t.Fatal(err)
		}
		at := time.Unix(int64(i), 0)
		if err := os.Chtimes(k.path(runtimeA, uuid), at, at); err != nil {
			t.Fatal(err)
		}
	}
	if files, err := os.ReadDir(k.dir); err != nil || len(files) != keptFiles {
		t.Errorf("%d files, %v, want %d", len(files), err, keptFiles)
	}
	for uuid, want := range map[string]bool{"0": false, "1": false, "2": true, fmt.Sprint(keptFiles + 1): true} {
		if l, err := k.get(runtimeA, uuid); (err == nil) != want || !want && !errdefs.IsNotFound(err) || want && l.Log != uuid {
			t.Errorf("the log of %s is %+v, %v", uuid, l, err)
		}
	}
	big := strings.Repeat("\x01", keptBytes) // six bytes each in JSON
	for i := range 2 * keptTotal / (6 * keptBytes) {
		if err := k.put(keptLog{UUID: fmt.Sprint("big", i), Runtime: runtimeA, Log: big}); err != nil {
			t.Fatal(err)
		}
	}
	files, err := os.ReadDir(k.dir)
	total := int64(0)
	for _, f := range files {
		if info, err := f.Info(); err == nil {
			total += info.Size()
		}
	}
	if err != nil || total > keptTotal || total < keptTotal/2 {
		t.Errorf("the files have %d bytes, %v, want at most %d", total, err, keptTotal)
	}
}

// TestALargeRecordKeepsTheOthers: no single module can remove the kept logs of the others.
func TestALargeRecordKeepsTheOthers(t *testing.T) {
	r := newRig(t, nil)
	for _, named := range []struct{ uuid, name string }{{"small", "m"}, {"long", strings.Repeat("<", keptTotal/6)}} {
		data, err := wire.ParseModuleData(object(moduleData(named.uuid, "name", named.name)))
		if err != nil {
			t.Fatal(err)
		}
		mod := r.m.hosts[0].newModule(named.uuid, data, record{})
		mod.log.add([]byte("line of " + named.uuid))
		r.m.hosts[0].keepLog(mod, []byte(`{"status": {"code": 3, "reason": "exited"}}`))
	}
	for _, uuid := range []string{"small", "long"} {
		if l := r.logOf(uuid); l.Log != "line of "+uuid || len(l.Name) > 1024 {
			t.Errorf("the kept log of %s is %q with a name of %d bytes and the error %q, want its line", uuid, l.Log, len(l.Name), l.Error)
		}
	}
	k := r.m.logs
	if err := k.put(keptLog{UUID: "huge", Runtime: runtimeA, Log: strings.Repeat("x", keptFile)}); !errdefs.IsResourceExhausted(err) {
		t.Errorf("a record beyond the bound gives %v, want %v", err, errdefs.ErrResourceExhausted)
	}
	if err := os.WriteFile(k.path(runtimeA, "old"), make([]byte, keptTotal+1), 0o600); err != nil { // of an earlier daemon
		t.Fatal(err)
	}
	if err := k.put(keptLog{UUID: "next", Runtime: runtimeA}); err != nil {
		t.Fatal(err)
	}
	if l, err := k.get(runtimeA, "small"); err != nil || l.Log == "" {
		t.Errorf("the kept log is %+v, %v after a file that is too large", l, err)
	}
}

// fullClient is a client whose queue has no room for answers to requests for logs until room is closed.
type fullClient struct {
	mqtt.Client
	room chan struct{}
}

func (c fullClient) Publish(ctx context.Context, topic string, qos byte, retain bool, payload []byte) error {
	if strings.HasSuffix(topic, "/kept") {
		select {
		case <-c.room:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return c.Client.Publish(ctx, topic, qos, retain, payload)
}

// TestLogRequestsAreBounded: requests whose answers cannot be sent are dropped and counted, and stop no orders.
func TestLogRequestsAreBounded(t *testing.T) {
	room := make(chan struct{})
	r := newRig(t, func(c *Config) {
		dial := c.Dial
		c.Dial = func(c mqtt.Config) (mqtt.Client, error) {
			client, err := dial(c)
			return fullClient{client, room}, err
		}
	})
	const more = 5
	for range 1 + logRequests + more {
		r.publish(topics.LogRequest(runtimeA), false, envelope(wire.ActionLog, moduleData("m")))
	}
	r.publish(topics.LogRequest(runtimeA), false, envelope(wire.ActionLog, moduleData("m", "unknown", strings.Repeat("x", logRequestBytes))))
	r.order(runtimeA, wire.ActionCreate, moduleData("m"))
	r.a.find(t, true, 0, wire.Create, 1)
	// The goroutine may have taken none or one of the requests when the last one came.
	if got := r.figures()["tripod_edge_refused_total log-request"]; got < more+1 || got > more+2 {
		t.Errorf("%v requests are counted as refused, want %d or %d", got, more+1, more+2)
	}
	close(room)
	r.find(t, topics.KeptLog(runtimeA, "m"), logRequests, nil)
}

// TestALogAnswerIsBounded: an answer has the latest lines whose JSON form is not too large.
func TestALogAnswerIsBounded(t *testing.T) {
	r := newRig(t, nil)
	r.order(runtimeA, wire.ActionCreate, moduleData("m"))
	r.states(runtimeA, "", map[string]string{"m": "running"})
	line := strings.Repeat("\x01", 1000)
	for range keptBytes / (len(line) + 1) {
		r.m.hosts[0].at(0).log.add([]byte(line))
	}
	l := r.logOf("m")
	lines := strings.Split(l.Log, "\n")
	if raw, err := json.Marshal(l); err != nil || len(raw) > logAnswerBytes+1024 || !l.Cut {
		t.Errorf("the answer has %d bytes and cut %v, %v, want at most %d and true", len(raw), l.Cut, err, logAnswerBytes+1024)
	}
	if want := logAnswerBytes / (6*len(line) + 2); len(lines) != want || lines[0] != line {
		t.Errorf("the answer has %d lines and begins with %.20q, want %d whole lines", len(lines), lines[0], want)
	}
	if l = r.logOf("m", "tail", 3); l.Cut || l.Log != line+"\n"+line+"\n"+line {
		t.Errorf("the last three lines have %d bytes and cut %v", len(l.Log), l.Cut)
	}
}

func FuzzLatest(f *testing.F) {
	f.Add("a\nb\x00\u2028<>&\"\\\xff\ufffd\x7f\b\f", 20)
	f.Add("one\ntwo", 3)
	f.Fuzz(func(t *testing.T, text string, most int) {
		got, cut := latest(text, most)
		raw, err := json.Marshal(got)
		if err != nil || !strings.HasSuffix(text, got) || cut != (got != text) || got != "" && len(raw)-2 > most {
			t.Errorf("the latest %d bytes of %q are %q, %v, with %d bytes of JSON, %v", most, text, got, cut, len(raw)-2, err)
		}
	})
}
