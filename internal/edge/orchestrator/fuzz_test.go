package orchestrator

import (
	"bytes"
	"fmt"
	"maps"
	"testing"

	"github.com/tripod-run/tripod/internal/edge/mqtt"
)

// FuzzMessages sends messages to an orchestrator with a node and modules; the first byte chooses the topic, and NULs
// separate messages. The orchestrator must keep serving, and its record must stay consistent and survive a restart.
func FuzzMessages(f *testing.F) {
	topics := []string{
		"realm/proc/control", "realm/proc/control/r1", "realm/proc/reg/m", "realm/proc/reg/r1", "realm/proc/keepalive/r1",
		"realm/proc/reg/new", "realm/proc/control/", "realm/proc", "other",
	}
	for i := range topics {
		for _, s := range []string{
			envelope("create", `{"type":"module","uuid":"b","parent":"r1","restart":"always"}`), envelope("delete", `{"type":"module","uuid":"a"}`),
			envelope("create_batch", `[{"type":"module","uuid":"c"},null,{}]`),
			envelope("exited", `{"type":"module","uuid":"a","status":{"code":1}}`),
			envelope("create", `{"type":"runtime","uuid":"r1","parent":"m","max_nmodules":0,"apis":[""]}`),
			envelope("delete", `{"type":"runtime","uuid":"r1"}`),
			managerWill, beatOf("r1"), `{"type":"resp"}`, `{`, ``, `null`,
			`{"object_id":"x","action":"create","type":"req","data":{"type":"module","uuid":"\u0000"}}`,
		} {
			f.Add(append([]byte{byte(i)}, s...))
		}
	}
	f.Add(bytes.Join([][]byte{append([]byte{3}, managerWill...), append([]byte{4}, beatOf("r1")...)}, []byte{0}))
	f.Fuzz(func(t *testing.T, input []byte) {
		b := open(t)
		b.node(2, "r1")
		b.create("a", "r1", "")
		for part := range bytes.SplitSeq(input, []byte{0}) {
			if len(part) > 0 {
				b.link.config.Handler(mqtt.Message{Topic: topics[int(part[0])%len(topics)], Payload: part[1:]})
			}
		}
		b.hear()
		b.sound(t)
		b.create("sane", "nowhere", "")
		if why := b.refusal(); why == "" {
			t.Error("it does not answer any more")
		}
		b.end()
		b.start()
		b.sound(t)
	})
}

// sound checks the invariants of the record.
func (b *bench) sound(t *testing.T) {
	t.Helper()
	for _, m := range b.state.list(Module) {
		r := b.state.get(key{Runtime, m.Parent})
		if m.Status.holds() && r == nil {
			t.Errorf("module %s is %s at an unknown runtime", m.UUID, m.Status)
			continue
		}
		if m.Status == Alive && r.Status != Alive {
			t.Errorf("module %s is alive at a dead runtime", m.UUID)
		}
	}
	used := map[string]int{}
	for _, m := range b.state.list(Module) {
		count(used, m, 1)
	}
	if got := b.state.slots(); !maps.Equal(got, used) {
		t.Errorf("slots in use are %v, counted %v", used, got)
	}
	onDisk := map[key]bool{}
	err := b.store.all(func(r *Record) error {
		onDisk[key{r.Kind, r.UUID}] = true
		if now := b.state.get(key{r.Kind, r.UUID}); now == nil || now.Status != r.Status {
			return fmt.Errorf("%s %s: %s on the disk, %v in memory", r.Kind, r.UUID, r.Status, now)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	for _, kind := range kinds {
		for _, r := range b.state.list(kind) {
			if !onDisk[key{kind, r.UUID}] {
				t.Errorf("%s %s is not on the disk", kind, r.UUID)
			}
		}
	}
}
