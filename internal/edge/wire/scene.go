package wire

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"

	"github.com/tripod-run/tripod/internal/channel"
)

// DefaultNamespace is the namespace of runtimes that name none, and of their messages.
const DefaultNamespace = "public"

// DefaultScene is the scene of modules that name none.
const DefaultScene = DefaultNamespace + "/default"

// Streams of a module that scene-scoped peers see as topics.
const (
	Stdin  = "stdin"
	Stdout = "stdout"
	Stderr = "stderr"
)

// SceneTopic is a topic of scene-scoped peers, in parts. These peers have no managers. Their topics name a namespace, or
// a scene in a namespace ("public/default"), instead of the protocol's part proc.
type SceneTopic struct {
	Namespace string // of a runtime's topic; otherwise ""
	Scene     string // namespace and scene of a module's topic; otherwise ""
	UUID      string // of the runtime or module
	Control   bool   // the topic is for requests to the runtime, and UUID is that runtime's
}

// SceneRuntime returns the topic of a scene-scoped runtime: for its registration and its keepalives, for the answers to
// it, and for the errors of requests that name no module. "+" stands for all.
func (t Topics) SceneRuntime(namespace, runtime string) string {
	return t.Realm + "/g/" + namespace + "/p/" + runtime
}

// SceneModule returns the topic of what a scene-scoped runtime says about a module. The scene "+/+" stands for all.
func (t Topics) SceneModule(scene, module string) string {
	return t.Realm + "/s/" + scene + "/p/" + module
}

// SceneControl returns the topic of requests to a scene-scoped runtime. The last level, by the public clients their own
// choice, is the module's uuid in our requests.
func (t Topics) SceneControl(scene, runtime, module string) string {
	return t.SceneModule(scene, runtime) + "/" + module
}

// SceneStream returns the topic of a module's standard stream. Its messages are bytes of the stream.
func (t Topics) SceneStream(scene, module, stream string) string {
	return t.SceneModule(scene, module) + "/-/" + stream
}

// ParseScene splits a topic of scene-scoped peers. It reports false for other topics, and for those of streams.
func (t Topics) ParseScene(topic string) (SceneTopic, bool) {
	rest, ok := strings.CutPrefix(topic, t.Realm)
	if !ok || !strings.HasPrefix(rest, "/g/") && !strings.HasPrefix(rest, "/s/") {
		return SceneTopic{}, false // most messages
	}
	l := strings.Split(rest[1:], "/")
	switch {
	case len(l) == 4 && l[0] == "g" && l[2] == "p":
		return SceneTopic{Namespace: l[1], UUID: l[3]}, true
	case len(l) == 5 && l[0] == "s" && l[3] == "p":
		return SceneTopic{Scene: l[1] + "/" + l[2], UUID: l[4]}, true
	case len(l) == 6 && l[0] == "s" && l[3] == "p":
		return SceneTopic{Scene: l[1] + "/" + l[2], UUID: l[4], Control: true}, true
	}
	return SceneTopic{}, false
}

// Scene returns the module's scene as "namespace/scene", or "" if it has none.
func (d ModuleData) Scene() string {
	scene := d.Text("scene")
	if scene == "" {
		return ""
	}
	namespace, name, _ := strings.Cut(scene, "/")
	if ValidName("scene", namespace) != nil || ValidName("scene", name) != nil {
		return ""
	}
	return scene
}

// FromScene returns the data of a scene-scoped peer's create message as other peers would write them: the program's name
// is the first of the arguments, the environment is a list, and the scene is set, by default to the one of the
// message's topic.
func (d ModuleData) FromScene(topic SceneTopic) ModuleData {
	c := maps.Clone(d)
	scene := d.Scene()
	if scene == "" {
		scene = topic.Scene
	}
	c.Set("scene", scene)
	if o := d.argsObject(); o == nil && d.validList("args") {
		c.Set("args", append([]string{d.program()}, d.list("args")...))
	}
	var env map[string]string
	if d.get("env", &env) {
		list := []string{}
		for _, name := range slices.Sorted(maps.Keys(env)) {
			list = append(list, name+"="+env[name])
		}
		c.Set("env", list)
	}
	return c
}

// ToScene returns the data of a create message as scene-scoped peers write them. It is the reverse of FromScene.
func (d ModuleData) ToScene() ModuleData {
	c := maps.Clone(d)
	if d.Scene() == "" {
		c.Set("scene", DefaultScene)
	}
	if isNull(d["file"]) && !isNull(d["filename"]) {
		c["file"] = d["filename"]
	}
	if args := d.Args(); len(args) > 0 {
		c.Set("args", args[1:])
	}
	if d.argsObject() != nil {
		c.Set("env", d.Env())
	}
	return c
}

// WithStreams returns the data with a channel for each standard stream that has none, to and from the topics of the
// module's scene. Data without a scene do not change.
func (d ModuleData) WithStreams(t Topics) ModuleData {
	scene := d.Scene()
	if scene == "" {
		return d
	}
	var all []json.RawMessage
	if !d.get("channels", &all) && !isNull(d["channels"]) {
		return d // Validate refuses them
	}
	named := d.Channels()
	for _, stream := range []string{Stdin, Stdout, Stderr} {
		if slices.ContainsFunc(named, func(c channel.Channel) bool { return c.Name == stream }) {
			continue
		}
		mode := "w"
		if stream == Stdin {
			mode = "r"
		}
		raw, err := json.Marshal(map[string]string{"name": stream, "topic": t.SceneStream(scene, d.UUID(), stream), "mode": mode})
		if err != nil { // strings have a JSON form
			panic(err)
		}
		all = append(all, raw)
	}
	c := maps.Clone(d)
	c.Set("channels", all)
	return c
}

// validList reports whether a field is missing, a string or a list of strings.
func (d ModuleData) validList(name string) bool {
	var list []string
	var one string
	return isNull(d[name]) || d.get(name, &list) || d.get(name, &one)
}

// Set sets a field of data that nobody else uses to a value, which must have a JSON form.
func (d ModuleData) Set(name string, value any) {
	raw, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	d[name] = raw
}
