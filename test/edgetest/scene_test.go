package edgetest_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/orchestrator"
	"github.com/tripod-run/tripod/test/edgetest"
)

// scenes starts a session of scene-scoped peers on each broker.
func scenes(t *testing.T, play func(t *testing.T, url string, r *edgetest.Recorder, c *edgetest.SceneClient)) {
	for name, start := range brokers {
		t.Run(name, func(t *testing.T) {
			url := start(t)
			r, err := edgetest.Record(url)
			require.NoError(t, err)
			t.Cleanup(r.Close)
			c, err := edgetest.StartSceneClient(url)
			require.NoError(t, err)
			t.Cleanup(c.Close)
			play(t, url, r, c)
		})
	}
}

func sceneRuntime(t *testing.T, url string, attempts int) *edgetest.SceneRuntime {
	r, err := edgetest.StartSceneRuntime(within(t), edgetest.SceneRuntimeConfig{
		URL: url, UUID: edgetest.SceneRuntimeUUID, Name: "arena-rt1", Attempts: attempts, Resend: 200 * time.Millisecond,
	})
	require.NoError(t, err)
	return r
}

// statusOf returns the state in our orchestrator's record.
func statusOf(t *testing.T, o *orchestrator.Orchestrator, what string) string {
	w := httptest.NewRecorder()
	o.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/api/"+what, nil))
	var record struct {
		Status string `json:"status"`
	}
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &record))
	return record.Status
}

func status(t *testing.T, o *orchestrator.Orchestrator, what, want string) {
	t.Helper()
	require.Eventually(t, func() bool { return statusOf(t, o, what) == want }, patience, 5*time.Millisecond, "%s: %s", what, want)
}

func heardBy(t *testing.T, r *edgetest.Recorder, want func(edgetest.Line) bool) {
	t.Helper()
	_, err := r.Wait(within(t), 1, want)
	require.NoError(t, err)
}

// talk uses a module: its first line, its standard input, and its end by a request.
func talk(t *testing.T, r *edgetest.Recorder, c *edgetest.SceneClient, parent, uuid, ready string) {
	t.Helper()
	heardBy(t, r, edgetest.SceneAnswer(uuid, "o-"+uuid, "create", "ok"))
	if ready != "" {
		heardBy(t, r, edgetest.Output(uuid, ready))
	}
	require.Eventually(t, func() bool { // the module may not listen yet when its creation is confirmed
		require.NoError(t, c.Input(uuid, "hello"))
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		_, err := r.Wait(ctx, 1, edgetest.Output(uuid, "HELLO\n"))
		return err == nil
	}, patience, time.Millisecond)
	require.NoError(t, c.Delete("d-"+uuid, parent, uuid))
	heardBy(t, r, edgetest.SceneAnswer(uuid, "d-"+uuid, "delete", "ok"))
}

const sceneFirst, sceneOther = edgetest.SceneModuleUUID, edgetest.SceneOtherUUID

// The scripted peers alone: this is the session that the tests below play with one of our sides.
func TestForeignScenePeers(t *testing.T) {
	scenes(t, func(t *testing.T, url string, r *edgetest.Recorder, c *edgetest.SceneClient) {
		rt := sceneRuntime(t, url, 2) // nobody answers
		defer rt.Close()
		require.NoError(t, c.Create("o-"+sceneFirst, edgetest.SceneModule(sceneFirst, "arena-rt1", "m.py", "PY", "x")))
		talk(t, r, c, "arena-rt1", sceneFirst, "ready [\"x\"]\n")
		assert.Equal(t, []string{
			" q0 create resp from=" + edgetest.SceneRuntimeUUID + " result=ok",
			`/-/stdout q0 "ready [\"x\"]\n"`,
			`/-/stdin q0 "hello"`,
			`/-/stdout q0 "HELLO\n"`,
			" q0 delete resp from=" + edgetest.SceneRuntimeUUID + " result=ok",
		}, inOrder(edgetest.SceneLines(r.Lines(), sceneFirst)))
	})
}

// inOrder makes the topic of a line visible when it is the module's own, and puts the input before its output: a broker passes
// a message to its subscribers one after the other, so the module's answer can reach the recorder before the input does.
func inOrder(lines []string) []string {
	for i, l := range lines {
		if l[0] != '/' {
			lines[i] = " " + l
		}
	}
	in := slices.Index(lines, `/-/stdin q0 "hello"`)
	out := slices.Index(lines, `/-/stdout q0 "HELLO\n"`)
	if 0 <= out && out < in {
		line := lines[in]
		lines = slices.Insert(slices.Delete(lines, in, in+1), out, line)
	}
	return lines
}

// Our manager is a runtime for scene-scoped clients, without any orchestrator.
func TestOurManagerForSceneClients(t *testing.T) {
	scenes(t, func(t *testing.T, url string, r *edgetest.Recorder, c *edgetest.SceneClient) {
		end := startManager(t, mqtt.Config{URL: url})
		heardBy(t, r, edgetest.On("realm/g/public/p/"+edgetest.RuntimeChan, `"action":"update"`))
		require.NoError(t, c.Create("o-"+sceneFirst, edgetest.SceneModule(sceneFirst, "chan", "upper", "WA", "x")))
		heardBy(t, r, edgetest.SceneAnswer(sceneFirst, "o-"+sceneFirst, "create", "ok"))
		heardBy(t, r, edgetest.On("realm/proc/log/"+edgetest.RuntimeChan+"/"+sceneFirst, "module started"))
		talk(t, r, c, "chan", sceneFirst, "")
		lines := r.Lines()
		assert.Equal(t, []string{
			" q2 create resp from=" + edgetest.RuntimeChan + " result=ok",
			`/-/stdin q0 "hello"`,
			`/-/stdout q0 "HELLO\n"`,
			`/-/stderr q0 "HELLO\n"`,
			" q2 delete resp from=" + edgetest.RuntimeChan + " result=ok",
		}, inOrder(edgetest.SceneLines(lines, sceneFirst)))
		assert.Empty(t, lines.Below("realm/proc/control"), "nothing in another dialect")
		assert.NotEmpty(t, lines.Select(edgetest.On("realm/proc/log/"+edgetest.RuntimeChan+"/"+sceneFirst, "HELLO")),
			"the output is the log, too")

		// A module that ends by itself, and requests that cannot be met.
		require.NoError(t, c.Create("o-2", edgetest.SceneModule(sceneOther, edgetest.RuntimeChan, "exit", "WA", "3")))
		line, err := r.Wait(within(t), 1, edgetest.SceneEnd(sceneOther))
		require.NoError(t, err)
		assert.Contains(t, string(line.Payload), `"code": 3`)
		require.NoError(t, c.Create("o-3", map[string]any{"type": "module", "uuid": sceneFirst, "parent": "chan", "args": 1}))
		heardBy(t, r, edgetest.SceneAnswer(sceneFirst, "o-3", "create", "error"))
		require.NoError(t, c.Delete("d-3", "chan", sceneFirst))
		heardBy(t, r, edgetest.SceneAnswer(sceneFirst, "d-3", "delete", "error"))
		require.NoError(t, end())
		heardBy(t, r, edgetest.On("realm/g/public/p/"+edgetest.RuntimeChan, `"action":"delete"`))
	})
}

// Our manager finds a scene-scoped orchestrator, and ends with a word to it.
func TestOurManagerForASceneOrchestrator(t *testing.T) {
	scenes(t, func(t *testing.T, url string, r *edgetest.Recorder, c *edgetest.SceneClient) {
		o, err := edgetest.StartSceneOrchestrator(url)
		require.NoError(t, err)
		defer o.Close()
		end := startManager(t, mqtt.Config{URL: url})
		for _, rt := range []string{edgetest.RuntimeMin, edgetest.RuntimeChan, edgetest.RuntimeTwo} {
			heardBy(t, r, edgetest.On("realm/g/public/p/"+rt, `"result":"ok"`))
			assert.True(t, o.Knows(rt))
		}
		require.NoError(t, c.Create("o-1", edgetest.SceneModule(sceneFirst, edgetest.RuntimeMin, "exit", "WA", "0")))
		heardBy(t, r, edgetest.SceneEnd(sceneFirst))
		require.NoError(t, end())
		require.Eventually(t, func() bool { return !o.Knows(edgetest.RuntimeMin) }, patience, 5*time.Millisecond)
	})
}

// Our orchestrator places modules on scene-scoped runtimes, whether they register or not.
func TestOurOrchestratorForSceneRuntimes(t *testing.T) {
	for how, attempts := range map[string]int{"skips": -1, "once": 1, "endless": 0} {
		t.Run(how, func(t *testing.T) {
			scenes(t, func(t *testing.T, url string, r *edgetest.Recorder, c *edgetest.SceneClient) {
				o := openOrchestrator(t, url)
				rt := sceneRuntime(t, url, attempts)
				if attempts >= 0 {
					heardBy(t, r, edgetest.On("realm/g/public/p/"+edgetest.SceneRuntimeUUID, `"result":"ok"`))
				}
				alive := make(chan struct{})
				var beats sync.WaitGroup
				beats.Go(func() {
					for tick := time.NewTicker(100 * time.Millisecond); ; {
						rt.Keepalive()
						select {
						case <-tick.C:
						case <-alive:
							return
						}
					}
				})
				status(t, o, "runtimes/arena-rt1", "A")

				// One that names its runtime, which hears the request itself.
				require.NoError(t, c.Create("o-"+sceneFirst, edgetest.SceneModule(sceneFirst, "arena-rt1", "m.py", "PY", "x")))
				heardBy(t, r, edgetest.Output(sceneFirst, "ready [\"x\"]\n"))
				status(t, o, "modules/"+sceneFirst, "A")
				require.NoError(t, c.Input(sceneFirst, "quit"))
				status(t, o, "modules/"+sceneFirst, "D")

				// One for which the orchestrator chooses the runtime, with an answer by that runtime.
				require.NoError(t, c.Create("o-"+sceneOther, edgetest.SceneModule(sceneOther, "", "m.py", "PY", "y")))
				talk(t, r, c, edgetest.SceneRuntimeUUID, sceneOther, "ready [\"y\"]\n")
				status(t, o, "modules/"+sceneOther, "D")

				// One by a client of the seed's dialect, which the runtime refuses.
				seed, err := edgetest.Dial(edgetest.PeerOptions{URL: url, ID: "seed"})
				require.NoError(t, err)
				defer seed.Close()
				require.NoError(t, seed.Publish("realm/proc/control", 2, edgetest.Message("s-1", "create", "arts_req", map[string]any{
					"type": "module", "uuid": "s", "parent": "arena-rt1", "filename": "x.wasm", "filetype": "WA", "args": []string{"x.wasm", "1"}})))
				heardBy(t, r, edgetest.On("realm/s/public/default/p/"+edgetest.SceneRuntimeUUID+"/s", `"args":["1"]`))
				status(t, o, "modules/s", "D")

				// A module whose end was lost, and the end of the runtime.
				require.NoError(t, c.Create("o-l", edgetest.SceneModule("lost", "arena-rt1", "m.py", "PY")))
				heardBy(t, r, edgetest.SceneAnswer("lost", "o-l", "create", "ok"))
				status(t, o, "modules/lost", "A")
				rt.Forget("lost")
				status(t, o, "modules/lost", "D")
				close(alive)
				beats.Wait()
				rt.Kill()
				status(t, o, "runtimes/arena-rt1", "D")
			})
		})
	}
}

// Our own pair serves a scene-scoped client that leaves the runtime to the orchestrator.
func TestOurPairForSceneClients(t *testing.T) {
	scenes(t, func(t *testing.T, url string, r *edgetest.Recorder, c *edgetest.SceneClient) {
		o := openOrchestrator(t, url)
		end := startManager(t, mqtt.Config{URL: url})
		for _, rt := range []string{edgetest.RuntimeMin, edgetest.RuntimeChan, edgetest.RuntimeTwo} {
			heardBy(t, r, edgetest.On("realm/proc/reg/"+rt, `"result"`))
		}
		require.NoError(t, c.Create("o-"+sceneFirst, edgetest.SceneModule(sceneFirst, "", "upper", "WA", "x")))
		heardBy(t, r, func(l edgetest.Line) bool {
			return strings.HasSuffix(l.Topic, "/"+sceneFirst) && strings.HasPrefix(string(l.Payload), "module started")
		})
		talk(t, r, c, "chan", sceneFirst, "")
		status(t, o, "modules/"+sceneFirst, "D")
		require.NoError(t, c.Create("o-2", edgetest.SceneModule(sceneOther, "", "m.py", "PY")))
		heardBy(t, r, edgetest.SceneAnswer(sceneOther, "o-2", "create", "error"))
		assert.Empty(t, r.Lines().Below("realm/proc/log/orchestrator"))
		require.NoError(t, end())
	})
}
