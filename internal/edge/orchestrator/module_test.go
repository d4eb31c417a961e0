package orchestrator

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestCreateWithParent(t *testing.T) {
	b := open(t)
	b.node(2, "r1", "r2")
	b.create("a", "r2", `,"custom":{"x":1},"args":["a","<b>"]`)
	m := b.hears("control/r2 create a")[0]
	if m.Data["status"] != "A" || m.Data["filetype"] != "WA" || m.Data["fault_crash"] != "ignore" || m.Data["parent"] != "r2" ||
		m.Data["type"] != "module" {
		t.Errorf("order %v", m.Data)
	}
	b.create("b", "name-r1", "")
	if m := b.hears("control/r1 create b")[0]; m.Data["parent"] != "r1" {
		t.Errorf("a parent by name becomes %v", m.Data["parent"])
	}
	b.wantStates("a:A b:A")
	b.exited("r2", "a", `"exited"`)
	b.hears("notif exited a")
	b.wantStates("a:D b:A")
	b.create("a", "r2", "") // its uuid is free again
	b.hears("control/r2 create a")
	b.wantStates("b:A a:A")
}

func TestFieldsAreKeptVerbatim(t *testing.T) {
	b := open(t)
	b.node(2, "r1")
	b.create("a", "r1", `,"big":123456789012345678901234567890,"html":"<&>",  "spaced": { "k" :  1 }`)
	b.link.set(func(l *link) {
		sent := string(l.sent[0].Payload)
		for _, want := range []string{`"big":123456789012345678901234567890`, `"html":"<&>"`, `"spaced":{ "k" :  1 }`} {
			if !strings.Contains(sent, want) {
				t.Errorf("%s is not in %s", want, sent)
			}
		}
	})
	b.end()
	b.start()
	if got := string(b.state.get(key{Module, "a"}).view().Bytes()); !strings.Contains(got, `"html":"<&>"`) ||
		!strings.Contains(got, `{ "k" :  1 }`) {
		t.Errorf("after a restart the data are %s, want them verbatim", got)
	}
}

func TestPlacementByAPIsAndFreeSlots(t *testing.T) {
	b := open(t)
	b.node(2, "r1", "r2")
	b.say("realm/proc/reg/r3",
		envelope("create", `{"type":"runtime","uuid":"r3","name":"x","apis":["wasm","gpu"],"parent":"m","max_nmodules":1}`))
	b.hear()
	b.create("a", "", "")
	b.hears("control/r1 create a") // all equal: the oldest
	b.create("b", "", "")
	b.hears("control/r2 create b") // most free slots
	b.create("c", "", `,"apis":["gpu"]`)
	b.hears("control/r3 create c")
	b.create("d", "", `,"apis":["gpu"]`)
	b.hears()
	b.create("e", "", `,"apis":["tpu"]`)
	if why := b.refusal(); !strings.Contains(why, "tpu") {
		t.Errorf("answered %q, want %q in it", why, "tpu")
	}
	b.wantStates("a:A b:A c:A d:Q")
	b.exited("r1", "a", `"exited"`)
	b.hears("notif exited a") // r1 has no gpu
	b.exited("r3", "c", `{"code":0,"reason":"exited"}`)
	b.hears("notif exited c", "control/r3 create d")
	b.wantStates("a:D b:A c:D d:A")
}

func TestQueueWhenFull(t *testing.T) {
	b := open(t)
	b.node(1, "r1", "r2")
	for _, m := range []string{"a", "b", "c"} {
		b.create(m, "r1", "")
	}
	b.hears("control/r1 create a") // r2 is free, but was not asked for
	b.wantStates("a:A b:Q c:Q")
	b.delete("b") // never was anywhere
	b.hears("notif exited b")
	b.delete("a")
	b.hears("control/r1 delete a")
	b.wantStates("a:E b:D c:Q") // an exiting one has its slot still
	b.delete("a")               // again: the manager may not have heard
	b.hears("control/r1 delete a")
	b.exited("r1", "a", `{"code":137,"reason":"killed"}`)
	b.hears("notif exited a", "control/r1 create c")
	b.wantStates("a:D b:D c:A")
	b.exited("r1", "a", `"exited"`) // told twice
	b.hears()
}

// TestE1MoreModulesThanSlots: modules beyond the slots are queued, and none is lost.
func TestE1MoreModulesThanSlots(t *testing.T) {
	b := open(t)
	b.node(128, "r1")
	for i := range 130 {
		b.create(fmt.Sprint("m", i), "r1", "")
	}
	if n := len(b.hear()); n != 128 {
		t.Errorf("%d modules were ordered at a runtime with 128 slots, want 128", n)
	}
	b.exited("r1", "m0", `"exited"`)
	b.exited("r1", "m1", `"exited"`)
	b.hears("notif exited m0", "control/r1 create m128", "notif exited m1", "control/r1 create m129")
}

func TestRefusals(t *testing.T) {
	b := open(t)
	b.node(1, "r1")
	b.create("a", "r1", "")
	b.hear()
	b.say("realm/proc/reg/r1", envelope("delete", `{"type":"runtime","uuid":"r1"}`))
	b.create("dead", "r1", "")
	if why := b.refusal(); !strings.Contains(why, "dead") {
		t.Errorf("answered %q, want %q in it", why, "dead")
	}
	b.register("r1", 1)
	b.hear()
	for why, payload := range map[string]string{
		"duplicate module UUID; request ignored": envelope("create", `{"type":"module","uuid":"a","parent":"r1"}`),
		"unknown parent":                         envelope("create", `{"type":"module","uuid":"x","parent":"nowhere"}`),
		`"uuid" is missing`:                      envelope("create", `{"type":"module","name":"x"}`),
		`"type" is missing`:                      envelope("create", `{"uuid":"x"}`),
		"this topic is for modules":              envelope("create", `{"type":"runtime","uuid":"x"}`),
		"no / + # $":                             envelope("create", `{"type":"module","uuid":"x/#"}`),
		`"parent" is not a string`:               envelope("create", `{"type":"module","uuid":"x","parent":7}`),
		`"restart" is not`:                       envelope("create", `{"type":"module","uuid":"x","parent":"r1","restart":"sometimes"}`),
		`"args" is not`:                          envelope("create", `{"type":"module","uuid":"x","parent":"r1","args":[1]}`),
		`unknown action "jump"`:                  envelope("jump", `{"type":"module","uuid":"x"}`),
		`unknown module "x"`:                     envelope("delete", `{"type":"module","uuid":"x"}`),
		"want a list of modules":                 envelope("create_batch", `{"type":"module"}`),
		"JSON object":                            `{"object_id":`,
		"of type":                                `{"object_id":"x","action":"create","type":"wish","data":{}}`,
		"is not a string":                        `{"object_id":[],"action":"create","type":"arts_req","data":{}}`,
		"are not a JSON object":                  envelope("create", `[1,2]`),
		"limit is 1048576":                       envelope("create", `{"type":"module","uuid":"x","args":["`+strings.Repeat("x", maxData)+`"]}`),
		"0 bytes":                                `{"object_id":"x","action":"create","type":"arts_req"}`,
	} {
		b.say("realm/proc/control", payload)
		if got := b.refusal(); !strings.Contains(got, why) {
			t.Errorf("%s\n\tis answered %q, want %q in it", payload, got, why)
		}
	}
	b.exited("r2", "a", `"exited"`)
	if got := b.refusal(); !strings.Contains(got, "belongs to the runtime") {
		t.Errorf("answered %q, want %q in it", got, "belongs to the runtime")
	}
	b.exited("r1", "x", `"exited"`) // a module that is desired of its manager is none of ours
	b.hears()
	b.wantStates("a:A")
	b.create("after", "r1", "") // it goes on serving
	b.wantStates("a:A after:Q")
}

func TestAnswersInTheWordsOfTheRequester(t *testing.T) {
	b := open(t)
	later := func(action, data string) string { return strings.Replace(envelope(action, data), "arts_req", "req", 1) }
	b.say("realm/proc/reg/m", later("create", `{"type":"manager","uuid":"m"}`))
	b.say("realm/proc/reg/r", later("create", `{"type":"runtime","uuid":"r","parent":"m"}`))
	b.say("realm/proc/control", envelope("create", `{"type":"module","uuid":"a","parent":"r"}`))
	b.say("realm/proc/control", later("create", `{"type":"module","uuid":"a","parent":"r"}`))
	b.say("realm/proc/control", envelope("create", `{"type":"module","uuid":"a","parent":"r"}`))
	var got []string
	for _, s := range b.hear() {
		got = append(got, s.ObjectID[:2]+" "+s.Action+" "+s.Type)
	}
	b.say("realm/proc/control", later("exited", `{"type":"module","uuid":"a","status":"exited"}`)) // their managers may say it here
	b.wantStates("a:D")
	b.say("realm/proc/control", later("create", `{"type":"module","uuid":"b","parent":"r"}`))
	b.hear()
	b.say("realm/proc/control", later("delete", `{"uuid":"b"}`)) // without its type
	b.hears("control/r delete b")
	got[2] = got[2][2:] // an id of its own
	if fmt.Sprint(got) != "[id create resp id create resp  create req id error resp id error arts_resp]" {
		t.Errorf("the answers are %q, want each with the types of its requester", got)
	}
}

func TestBatch(t *testing.T) {
	for name, form := range map[string]string{"list": "%s", "object": `{"type":"module","modules":%s}`} {
		t.Run(name, func(t *testing.T) {
			b := open(t)
			b.node(2, "r1")
			list := `[{"type":"module","uuid":"a"},{"type":"module","uuid":"a"},7,{"type":"module","uuid":"b","parent":"name-r1"},{"type":"module","uuid":"c"}]`
			b.say("realm/proc/control", envelope("create_batch", fmt.Sprintf(form, list)))
			b.hears("control/r1 create a", "control/r1 create b", "log/orchestrator error", "log/orchestrator error")
			b.wantStates("a:A b:A c:Q")
		})
	}
}

func TestRestartPolicies(t *testing.T) {
	const ok, bad = `{"code":0,"reason":"exited"}`, `{"code":1,"reason":"exited"}`
	for name, c := range map[string]struct {
		fields, status string
		again          bool
	}{
		"none":                         {``, bad, false},
		"never":                        {`,"restart":"never","fault_crash":"restart"`, bad, false},
		"always, exit 0":               {`,"restart":"always"`, ok, true},
		"always, exit 1":               {`,"restart":"always"`, bad, true},
		"on-failure, exit 0":           {`,"restart":"on-failure"`, ok, false},
		"on-failure, exit 1":           {`,"restart":"on-failure"`, bad, true},
		"on-failure, trap":             {`,"restart":"on-failure"`, `{"code":0,"reason":"trap"}`, true},
		"on-failure, foreign exit":     {`,"restart":"on-failure"`, `"exited"`, false},
		"on-failure, foreign exit 3":   {`,"restart":"on-failure"`, `"exited","exit_code":3`, true},
		"on-failure, foreign killed":   {`,"restart":"on-failure"`, `"killed"`, true},
		"fault_crash, exit 1":          {`,"fault_crash":"restart"`, bad, true},
		"fault_crash, exit 0":          {`,"fault_crash":"restart"`, ok, false},
		"fault_crash ignore, trap":     {`,"fault_crash":"ignore"`, `{"code":134,"reason":"trap"}`, false},
		"on-failure, status of nobody": {`,"restart":"on-failure"`, `[1]`, false},
	} {
		t.Run(name, func(t *testing.T) {
			b := open(t)
			b.node(1, "r1")
			b.create("a", "r1", c.fields)
			first := b.hears("control/r1 create a")[0]
			b.exited("r1", "a", c.status)
			b.hears("notif exited a")
			if !c.again {
				b.wantStates("a:D")
				return
			}
			b.wantStates("a:K")
			b.checkDeadlines(t.Context())
			b.hears() // not yet
			b.clock.pass(time.Second)
			b.checkDeadlines(t.Context())
			if second := b.hears("control/r1 create a")[0]; second.ObjectID == first.ObjectID {
				t.Error("the next life has the order of the last")
			}
			b.wantStates("a:A")
		})
	}
}

func TestBackoffDoublesAndBeginsAnew(t *testing.T) {
	b := open(t, func(c *Config) { c.RestartMax, c.RestartReset = 5*time.Second, time.Minute })
	b.node(1, "r1")
	b.create("a", "r1", `,"restart":"always"`)
	b.create("waits", "r1", "")
	for i, want := range []time.Duration{1, 2, 4, 5, 5} {
		b.exited("r1", "a", `"exited"`)
		b.exited("r1", "a", `"exited"`) // told twice
		if got := b.state.get(key{Module, "a"}).RestartAt.Sub(b.clock.Now()); got != want*time.Second {
			t.Fatalf("restart %d after %v, want %v s", i, got, want)
		}
		b.wantStates("a:K waits:Q") // its slot is kept
		b.clock.pass(want * time.Second)
		b.checkDeadlines(t.Context())
		b.wantStates("a:A waits:Q")
	}
	b.clock.pass(time.Minute)
	b.exited("r1", "a", `"exited"`)
	if got := b.state.get(key{Module, "a"}).RestartAt.Sub(b.clock.Now()); got != time.Second {
		t.Errorf("after a long run it comes back after %v", got)
	}
	b.hear()
	b.delete("a") // while its back-off is under way
	b.hears("notif exited a", "control/r1 create waits")
	b.clock.pass(time.Hour)
	b.checkDeadlines(t.Context())
	b.hears()
	b.wantStates("a:D waits:A")
}

func TestMessagesPastTheOrchestrator(t *testing.T) {
	b := open(t)
	b.node(2, "r1")
	b.say("realm/proc/control/r1", envelope("create", `{"type":"module","uuid":"a","filename":"/f"}`))
	b.hears() // the manager has it already
	b.wantStates("a:A")
	b.say("realm/proc/control/r1", envelope("delete", `{"type":"module","uuid":"a"}`))
	b.hears()
	b.wantStates("a:E")
	b.exited("r1", "a", `"exited"`)
	b.hears("notif exited a")
	b.say("realm/proc/control/nowhere", envelope("create", `{"type":"module","uuid":"b"}`))
	b.refusal()
}

func TestOwnMessagesAreIgnored(t *testing.T) {
	b := open(t)
	b.node(2, "r1")
	b.create("a", "r1", "")
	b.delete("a")
	b.create("b", "r1", "")
	var echoes [][2]string
	b.link.set(func(l *link) {
		for _, m := range l.sent {
			echoes = append(echoes, [2]string{m.Topic, string(m.Payload)})
		}
	})
	b.hear()
	b.say("realm/proc/reg/r1", `{"object_id":"x","action":"create","type":"arts_resp","data":{"result":"ok"}}`)
	for _, e := range echoes {
		b.say(e[0], e[1])
	}
	b.hears()
	b.wantStates("a:E b:A")
	b.end()
	b.start() // the next process knows them too
	for _, e := range echoes {
		b.say(e[0], e[1])
	}
	for _, s := range b.hear() {
		if s.Action == "error" {
			t.Errorf("its own message is refused: %v", s)
		}
	}
	b.wantStates("a:E b:A")
}
