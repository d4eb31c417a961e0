package wire

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestSceneTopics(t *testing.T) {
	topics := Topics{Realm: "realm"}
	for topic, want := range map[string]SceneTopic{
		topics.SceneRuntime("public", "rt"):                 {Namespace: "public", UUID: "rt"},
		topics.SceneModule("public/arena", "m"):             {Scene: "public/arena", UUID: "m"},
		topics.SceneControl("public/arena", "rt", "anyone"): {Scene: "public/arena", UUID: "rt", Control: true},
	} {
		got, ok := topics.ParseScene(topic)
		assert.True(t, ok, topic)
		assert.Equal(t, want, got, topic)
		assert.True(t, topics.Governs(topic), topic)
	}
	for _, topic := range []string{
		topics.SceneStream("public/arena", "m", Stdout), "realm/s/public/arena/o/x", "realm/g/public/x/y", "realm/s/public/p/m",
		"other/g/public/p/rt", topics.Control(),
	} {
		_, ok := topics.ParseScene(topic)
		assert.False(t, ok, topic)
	}
}

// The data of a scene-scoped peer's create message: arguments without the program, the environment as an object, and a
// file below a location.
const sceneData = `{"type":"module","uuid":"m","name":"n","parent":"rt","scene":"public/arena","file":"upper.wasm","location":"arena/py",` +
	`"filetype":"WA","args":["x"],"env":{"SCENE":"arena","NAMESPACE":"public"},"channels":[]}`

func TestSceneData(t *testing.T) {
	d, err := ParseModuleData([]byte(sceneData))
	require.NoError(t, err)
	seed := d.FromScene(SceneTopic{Scene: "other/topic", UUID: "rt", Control: true})
	require.NoError(t, seed.Validate())
	assert.Equal(t, []string{"upper.wasm", "x"}, seed.Args())
	assert.Equal(t, []string{"NAMESPACE=public", "SCENE=arena"}, seed.Env())
	assert.Equal(t, "arena/py/upper.wasm", seed.File())
	assert.Equal(t, "public/arena", seed.Scene())

	back := seed.ToScene()
	assert.JSONEq(t, `["x"]`, string(back["args"]))
	assert.JSONEq(t, `"upper.wasm"`, string(back["file"]), "the location stays apart")

	for text, want := range map[string]string{`"ns/sc"`: "ns/sc", `"alone"`: "other/topic", `"a/b/c"`: "other/topic", `"a/+"`: "other/topic",
		`1`: "other/topic"} {
		changed := d.Without("scene")
		changed["scene"] = []byte(text)
		assert.Equal(t, want, changed.FromScene(SceneTopic{Scene: "other/topic"}).Scene(), text)
	}
	bad := d.Without("args")
	bad["args"] = []byte(`[1]`)
	assert.Error(t, bad.FromScene(SceneTopic{Scene: "a/b"}).Validate(), "bad arguments are not replaced")
}

// A request of the seed's dialect on its way to a scene-scoped runtime.
func TestSceneDataFromOthers(t *testing.T) {
	for text, want := range map[string]string{
		`{"uuid":"m","filename":"/srv/a.wasm","args":["a.wasm","x"]}`:               `{"uuid":"m","filename":"/srv/a.wasm","file":"/srv/a.wasm","args":["x"],"scene":"public/default"}`,
		`{"uuid":"m","filename":"/srv/a.wasm","args":{"argv":["x"],"env":["A=1"]}}`: `{"uuid":"m","filename":"/srv/a.wasm","file":"/srv/a.wasm","args":["x"],"env":["A=1"],"scene":"public/default"}`,
		`{"uuid":"m","file":"b.py","args":[],"scene":"ns/sc"}`:                      `{"uuid":"m","file":"b.py","args":[],"scene":"ns/sc"}`,
	} {
		d, err := ParseModuleData([]byte(text))
		require.NoError(t, err)
		assert.JSONEq(t, want, string(d.ToScene().Bytes()), text)
	}
}

func TestStreamsOfAScene(t *testing.T) {
	topics := Topics{Realm: "realm"}
	d, err := ParseModuleData([]byte(`{"uuid":"m","scene":"a/b","channels":[{"name":"stdout","topic":"mine","mode":"w"}]}`))
	require.NoError(t, err)
	with := d.WithStreams(topics)
	require.NoError(t, with.Validate())
	var got []string
	for _, c := range with.Channels() {
		got = append(got, c.Name+" "+c.Topic)
	}
	assert.Equal(t, []string{"stdout mine", "stdin realm/s/a/b/p/m/-/stdin", "stderr realm/s/a/b/p/m/-/stderr"}, got)
	assert.Equal(t, string(with.Bytes()), string(with.WithStreams(topics).Bytes()), "twice is once")
	assert.Len(t, d.Channels(), 1, "the original is not touched")
	plain, err := ParseModuleData([]byte(`{"uuid":"m"}`))
	require.NoError(t, err)
	assert.Equal(t, plain, plain.WithStreams(topics))
}
