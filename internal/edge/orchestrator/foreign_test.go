package orchestrator

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/test/edgetest"
)

// wanted returns the recorded session as it should be: without the public orchestrator's errors about its own messages
// and its answers to nobody, and with the further fields that the protocol has in answers.
func wanted() []string {
	var lines edgetest.Lines
	for _, l := range edgetest.Session().Without("realm/proc/log/orchestrator") {
		text := string(l.Payload)
		if strings.HasPrefix(l.Topic, "realm/proc/control/") && strings.Count(l.Topic, "/") == 4 {
			continue
		}
		if strings.Contains(text, "arts_resp") {
			text = strings.Replace(text, `"type":"arts_resp"`, `"action":"create","type":"arts_resp"`, 1)
			text = strings.Replace(text, `"name":"node","status":"A"`, `"name":"node","ka_interval_sec":60,"status":"A"`, 1)
		}
		l.Payload = []byte(text)
		lines = append(lines, l)
	}
	return lines.Normal()
}

// TestForeignManagerAndClient plays the whole session with scripted peers that imitate the public manager and client,
// and compares topics, QoS and payloads with the recorded session.
func TestForeignManagerAndClient(t *testing.T) {
	for name, start := range brokers {
		for _, protocol := range []int{5, 4} {
			t.Run(fmt.Sprint(name, " ", protocol), func(t *testing.T) {
				t.Parallel()
				ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
				defer cancel()
				url := start(t)
				recorder, err := edgetest.Record(url)
				if err != nil {
					t.Fatal(err)
				}
				defer recorder.Close()
				o := serve(t, url, protocol, filepath.Join(t.TempDir(), "record"))
				defer stop(t, o)
				manager, err := edgetest.StartManager(ctx, edgetest.SessionManager(url, false))
				if err != nil {
					t.Fatal(err)
				}
				defer manager.Kill()
				err = edgetest.Player{URL: url, Recorder: recorder, BeforeQuit: func() error {
					if err := manager.Keepalive(edgetest.RuntimeChan); err != nil {
						return err
					}
					return manager.Keepalive(edgetest.RuntimeTwo)
				}}.Play(ctx)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := recorder.Wait(ctx, 2, edgetest.On("realm/proc/notif", "exited")); err != nil {
					t.Fatal(err)
				}
				manager.Kill()
				eventually(t, "the manager is lost", func() bool { return o.state.get(key{Manager, edgetest.ManagerUUID}).Status == Dead })
				if _, err := recorder.Wait(ctx, 1, edgetest.On("realm/proc/reg/"+edgetest.ManagerUUID, `"delete"`)); err != nil {
					t.Fatal(err)
				}
				got, want := recorder.Lines().Normal(), wanted()
				for _, l := range want {
					if !slices.Contains(got, l) {
						t.Errorf("missing: %s", l)
					}
				}
				for _, l := range got {
					if !slices.Contains(want, l) {
						t.Errorf("too much: %s", l)
					}
				}
				if len(got) != len(want) {
					t.Errorf("%d messages, want %d", len(got), len(want))
				}
			})
		}
	}
}

// TestForeignManagerOfLaterPeers: a manager with the type "req" is killed; its modules are created again when it
// registers again.
func TestForeignManagerOfLaterPeers(t *testing.T) {
	url := embedded(t)
	o := serve(t, url, 5, filepath.Join(t.TempDir(), "record"))
	defer stop(t, o)
	recorder, err := edgetest.Record(url)
	if err != nil {
		t.Fatal(err)
	}
	defer recorder.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	config := edgetest.SessionManager(url, false)
	config.Later = true
	for life := 1; life <= 2; life++ {
		manager, err := edgetest.StartManager(ctx, config)
		if err != nil {
			t.Fatal(err)
		}
		if life == 1 {
			client, err := edgetest.Dial(edgetest.PeerOptions{URL: url, ID: "client"})
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			data := map[string]any{"type": "module", "uuid": "a", "parent": "chan", "args": []string{"upper"},
				"channels": []map[string]any{{"topic": "t", "mode": "r"}}}
			if err := client.Publish("realm/proc/control", 2, edgetest.Message("", "create", "req", data)); err != nil {
				t.Fatal(err)
			}
		}
		started := edgetest.On("realm/proc/log/"+edgetest.RuntimeChan+"/a", "started")
		if _, err := recorder.Wait(ctx, life, started); err != nil {
			t.Fatal(err)
		}
		manager.Kill()
		eventually(t, "its module is killed", func() bool { return o.state.get(key{Module, "a"}).Status == Killed })
	}
	for _, l := range recorder.Lines() {
		var e struct{ Type string }
		if json.Unmarshal(l.Payload, &e) == nil && strings.HasPrefix(e.Type, "arts_") {
			t.Errorf("to a later peer: %s", l)
		}
	}
}
