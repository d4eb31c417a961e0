package wire

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/channel"
)

func TestEnvelope(t *testing.T) {
	// A request and an answer as public peers were recorded to send them; the answer has no action.
	e, err := ParseEnvelope([]byte(`{"object_id":"o-1","action":"create","type":"arts_req","data":{"uuid":"u", "x": 1e400},"later":[1]}`))
	require.NoError(t, err)
	assert.Equal(t, "o-1", e.ObjectID)
	assert.Equal(t, ActionCreate, e.Action)
	assert.True(t, e.IsRequest())
	assert.Equal(t, `{"uuid":"u", "x": 1e400}`, string(e.Data), "verbatim")
	assert.Equal(t, `{"object_id":"o-1","action":"create","type":"arts_req","data":{"uuid":"u", "x": 1e400},"later":[1]}`, string(e.Bytes()))

	e, err = ParseEnvelope([]byte(`{"object_id": "o", "type": "arts_resp", "data": {"result": "ok"}}`))
	require.NoError(t, err)
	assert.True(t, e.IsResponse())
	assert.Empty(t, e.Action)

	for later, want := range map[string]string{Request: Response, RequestLater: ResponseLater} {
		e, err = ParseEnvelope([]byte(`{"object_id":"o","action":"create","type":"` + later + `"}` + "\x00"))
		require.NoError(t, err)
		assert.Equal(t, `{"object_id":"o","action":"create","type":"`+want+`","data":{}}`, string(e.Answer(json.RawMessage(`{}`)).Bytes()))
	}
}

func TestEnvelopeRefusals(t *testing.T) {
	for _, bad := range []string{
		"", "{", "null", "[]", `"text"`, "\xff", `{"type":"arts_req"`, `{"object_id":1,"type":"arts_req"}`, `{"type":"arts_req","action":{}}`,
		`{"object_id":"o"}`, `{"type":"other"}`, `{"Type":"arts_req"}`, `{"type":"arts_req","data":NaN}`, strings.Repeat(`{"a":`, 20000),
	} {
		_, err := ParseEnvelope([]byte(bad))
		assert.ErrorIs(t, err, errdefs.ErrInvalidArgument, "%.40q", bad)
	}
}

const recorded = `{"type": "module", "uuid": "33333333-0000-4000-8000-000000000002", "name": "a", "parent": "11111111-0000-4000-8000-000000000003", ` +
	`"filename": "/srv/wasm/upper.wasm", "filetype": "WA", "apis": ["wasm", "wasi"], "args": ["upper", "x"], "env": [], ` +
	`"channels": [{"mode": "r", "topic": "app/in"}, {"mode": "w", "topic": "app/mid"}], "peripherals": [], "resources": null, "fault_crash": "ignore", "status": "A"}`

func TestModuleData(t *testing.T) {
	d, err := ParseModuleData([]byte(recorded))
	require.NoError(t, err)
	require.NoError(t, d.Validate())
	assert.Equal(t, "33333333-0000-4000-8000-000000000002", d.UUID())
	assert.Equal(t, "a", d.Name())
	assert.Equal(t, "11111111-0000-4000-8000-000000000003", d.Parent())
	assert.Equal(t, "/srv/wasm/upper.wasm", d.File())
	assert.Equal(t, "WA", d.FileType())
	assert.Equal(t, []string{"wasm", "wasi"}, d.APIs())
	assert.Equal(t, []string{"upper", "x"}, d.Args())
	assert.Empty(t, d.Env())
	assert.Nil(t, d.Resources())
	assert.Equal(t, "ignore", d.FaultCrash())
	assert.Equal(t, RestartNever, d.Restart())
	assert.Equal(t, []channel.Channel{{Name: "in", Topic: "app/in", Flags: channel.Read},
		{Name: "mid", Topic: "app/mid", Flags: channel.Write}}, d.Channels())
	assert.JSONEq(t, recorded, string(d.Bytes()))

	d, err = ParseModuleData([]byte(`{"uuid":"u","args":{"argv":["a","b0"],"env":["A=1"],"dirs":["/x"]},"env":["B=2"],"dir":"/y","dirs":["/z"],"file":"/f","filename":"/g",` +
		`"restart":"always","resources":{"memory":1},"channels":[{"topic":"a/#","mode":"r:1","name":"in"},{"topic":"b","flags":7},{"topic":"c","flags":"w","qos":2}]}`))
	require.NoError(t, err)
	require.NoError(t, d.Validate())
	assert.Equal(t, []string{"f", "a", "b0"}, d.Args())
	assert.Equal(t, []string{"B=2", "A=1"}, d.Env())
	assert.Equal(t, []string{"/y", "/z", "/x"}, d.Dirs())
	assert.Equal(t, "/f", d.File())
	assert.Equal(t, "1", string(d.Resources()["memory"]))
	assert.Equal(t, []channel.Channel{{Name: "in", Topic: "a/#", Flags: channel.Read | channel.QoS1},
		{Name: "b", Topic: "b", Flags: channel.ReadWrite | channel.QoS1}, {Name: "c", Topic: "c", Flags: channel.Write | channel.QoS2}},
		d.Channels())
}

// TestArgumentsOfLaterPeers: an object's arguments have no program name.
func TestArgumentsOfLaterPeers(t *testing.T) {
	for text, want := range map[string][]string{
		`{"uuid":"u","filename":"/srv/wasm/upper.wasm","args":{"argv":["x"]}}`: {"upper.wasm", "x"},
		`{"uuid":"u","filename":"upper.wasm","args":{"argv":[]}}`:              {"upper.wasm"},
		`{"uuid":"u","name":"n","image":"i","args":{"argv":["x"]}}`:            {"n", "x"},
		`{"uuid":"u","image":"i","args":{"argv":["x"]}}`:                       {"u", "x"},
		`{"uuid":"u","filename":"upper.wasm","args":{"env":["A=1"]}}`:          nil,
		`{"uuid":"u","filename":"upper.wasm","args":["upper","x"]}`:            {"upper", "x"},
	} {
		d, err := ParseModuleData([]byte(text))
		require.NoError(t, err)
		require.NoError(t, d.Validate())
		assert.Equal(t, want, d.Args(), text)
	}
}

// The public peers put the program's name before the arguments again with every start (a defect noted in the protocol).
func TestArgumentsDoNotGrow(t *testing.T) {
	d, err := ParseModuleData([]byte(recorded))
	require.NoError(t, err)
	for i := range 5 {
		next, err := d.With("index", i)
		require.NoError(t, err)
		args := append(next.Args(), "more")
		args[0] = "changed"
		assert.Equal(t, []string{"upper", "x"}, next.Args())
		assert.NotContains(t, d, "index", "the original is not touched")
		d = next.Without("index")
	}
	assert.JSONEq(t, recorded, string(d.Bytes()))
}

func TestModuleDataKeepsWhatItDoesNotKnow(t *testing.T) {
	const odd = `{"a<b":"<&>\u2028","big":123456789012345678901234567890,"uuid":"u","x":{"nested": [1.50, "é"]}}`
	d, err := ParseModuleData([]byte(odd))
	require.NoError(t, err)
	with, err := d.With("index", 3)
	require.NoError(t, err)
	assert.Equal(t, `{"a\u003cb":"<&>\u2028","big":123456789012345678901234567890,"index":3,"uuid":"u","x":{"nested": [1.50, "é"]}}`,
		string(with.Bytes()))
}

func TestModuleDataRefusals(t *testing.T) {
	for _, bad := range []string{
		`{}`, `{"uuid":""}`, `{"uuid":1}`, `{"uuid":"a/b"}`, `{"uuid":"+"}`, `{"uuid":".."}`, `{"uuid":"$x"}`,
		`{"uuid":"` + strings.Repeat("x", 300) + `"}`,
		`{"uuid":"u","name":{}}`, `{"uuid":"u","args":[1]}`, `{"uuid":"u","args":{"argv":[{}]}}`, `{"uuid":"u","env":{"a":1}}`,
		`{"uuid":"u","args":["a\u0000"]}`,
		`{"uuid":"u","file":"a\u0000b"}`, `{"uuid":"u","restart":"sometimes"}`, `{"uuid":"u","resources":[]}`, `{"uuid":"u","channels":["a"]}`,
		`{"uuid":"u","channels":[{"mode":"rw","topic":"a/#"}]}`, `{"uuid":"u","channels":[{"mode":"x","topic":"a"}]}`,
		`{"uuid":"u","channels":[{"mode":"r"}]}`,
		`{"uuid":"u","channels":[{"topic":"a","qos":3}]}`, `{"uuid":"u","channels":[{"topic":"a","flags":0}]}`,
	} {
		d, err := ParseModuleData([]byte(bad))
		require.NoError(t, err, bad)
		assert.ErrorIs(t, d.Validate(), errdefs.ErrInvalidArgument, bad)
	}
	_, err := ParseModuleData([]byte(`null`))
	assert.ErrorIs(t, err, errdefs.ErrInvalidArgument)
	assert.Empty(t, ModuleData(nil).Args())
}

// The numbers are the protocol's (Seed 4, "Messaging").
func TestControlMessages(t *testing.T) {
	assert.Equal(t, []int{0, 1, 2}, []int{Create, Delete, Stop})
	assert.Equal(t, []int{0, 1, 2, 3, 4, 5, 6},
		[]int{Keepalive, RuntimeLog, Exited, channel.OpenChannel, channel.CloseChannel, ModuleLog, Profile})
}

func TestTopics(t *testing.T) {
	seed, nested := Topics{Realm: "realm"}, Topics{Realm: "realm", Nested: true}
	for _, c := range [][2]string{
		{seed.Reg("u"), "realm/proc/reg/u"},
		{seed.Control(), "realm/proc/control"},
		{seed.ControlOf("rt"), "realm/proc/control/rt"},
		{seed.Keepalive("rt"), "realm/proc/keepalive/rt"},
		{seed.RuntimeLog("rt"), "realm/proc/log/rt"},
		{seed.ModuleLog("rt", "m"), "realm/proc/log/m"},
		{nested.ModuleLog("rt", "m"), "realm/proc/log/rt/m"},
		{seed.Profile("k", "rt", "m"), "realm/proc/profile/k/m"},
		{nested.Profile("k", "rt", "m"), "realm/proc/profile/k/rt/m"},
		{seed.Errors(), "realm/proc/log/orchestrator"},
		{seed.Notif(), "realm/proc/notif"},
		{seed.Desired("rt"), "realm/proc/desired/rt"},
		{seed.Reported("rt"), "realm/proc/reported/rt"},
		{seed.Expand("$SL/proc/stdio", "m"), "realm/proc/stdio/m"},
		{seed.Expand("app/in", "m"), "app/in"},
	} {
		assert.Equal(t, c[1], c[0])
	}
	for _, topic := range []string{seed.Control(), seed.ControlOf("rt"), seed.Reg("u"), seed.Keepalive("rt"), seed.Desired("rt"),
		seed.Reported("rt"), seed.Expand("$SL/proc/control", "m")} {
		assert.True(t, seed.Governs(topic), topic)
	}
	for _, topic := range []string{"realm/proc/controls", seed.ModuleLog("rt", "m"), seed.Expand("$SL/proc/stdio", "m"), "other/proc/control",
		"app/in"} {
		assert.False(t, seed.Governs(topic), topic)
	}
	assert.Equal(t, []string{"a", "b"}, Cut("realm/proc/log/a/b", "realm/proc/log"))
	assert.Nil(t, Cut("realm/proc/log", "realm/proc/log"))
	assert.Nil(t, Cut("realm/proc/logs/a", "realm/proc/log"))
}

func TestParseLog(t *testing.T) {
	level, text := ParseLog([]byte("\x82hello"))
	assert.Equal(t, 2, level)
	assert.Equal(t, "hello", string(text))
	for _, plain := range []string{"", "hello", "é"} {
		level, text = ParseLog([]byte(plain))
		assert.Equal(t, -1, level)
		assert.Equal(t, plain, string(text))
	}
}

func FuzzEnvelope(f *testing.F) {
	f.Add([]byte(`{"object_id":"o-1","action":"create","type":"arts_req","data":` + recorded + `,"x":1}`))
	f.Add([]byte(`{"object_id":null,"type":"resp","data":null,"\u0000":"<"}`))
	f.Fuzz(func(t *testing.T, payload []byte) {
		ParseLog(payload)
		e, err := ParseEnvelope(payload)
		if err != nil {
			if !errdefs.IsInvalidArgument(err) {
				t.Fatalf("an error without a class: %v", err)
			}
			return
		}
		again, err := ParseEnvelope(e.Bytes())
		if err != nil {
			t.Fatalf("%s: %v", e.Bytes(), err)
		}
		assert.Equal(t, e, again)
		_ = e.Answer(e.Data).Bytes()
	})
}

func FuzzModuleData(f *testing.F) {
	f.Add([]byte(recorded))
	f.Add([]byte(`{"uuid":"u","args":{"argv":["a"],"env":["A=1"],"dirs":"/x"},"channels":[{"topic":"a/#","flags":5,"qos":1}],"resources":{}}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		d, err := ParseModuleData(raw)
		if err != nil {
			return
		}
		valid := d.Validate() == nil
		if channels := d.Channels(); valid {
			for _, c := range channels {
				if err := (channel.Open{Flags: c.Flags, Topic: c.Topic}).Validate(); err != nil {
					t.Fatal(err)
				}
			}
		}
		_ = [][]string{d.Args(), d.Env(), d.Dirs(), d.APIs()}
		scene := d.FromScene(SceneTopic{Scene: DefaultScene}).WithStreams(Topics{Realm: "r"})
		if err := scene.Validate(); valid && err != nil {
			t.Fatalf("%s: %v", scene.Bytes(), err)
		}
		_ = scene.ToScene()
		with, err := d.With("index", 1)
		if err != nil {
			t.Fatal(err)
		}
		again, err := ParseModuleData(with.Bytes())
		if err != nil {
			t.Fatalf("%s: %v", with.Bytes(), err)
		}
		assert.Equal(t, with, again)
	})
}
