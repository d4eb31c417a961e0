package oci

import (
	"strings"
	"testing"
)

func TestMonitorOf(t *testing.T) {
	pod, id := strings.Repeat("a", 64), strings.Repeat("b", 64)
	for line, want := range map[string]string{
		"/usr/bin/conmon --cid x --bundle /r/" + pod + "/" + id:          id,
		"/usr/bin/conmon --cid x --bundle /other/" + pod + "/" + id:      "",
		"/usr/bin/conmon --cid x --bundle /r/" + pod + "/../../etc":      "",
		"/usr/bin/conmon --cid x --bundle /r/" + pod + "/" + id + "/x":   "",
		"/usr/bin/something --cid x --bundle /r/" + pod + "/" + id:       "",
		"/usr/bin/conmon --bundle":                                       "",
		"/usr/bin/conmon --exec --cid " + id + " --exec-process-spec /p": "",
	} {
		got, ok := monitorOf(strings.Fields(line), "/r")
		if ok != (want != "") || ok && got != want {
			t.Errorf("monitorOf(%q) = %q, %v, want %q", line, got, ok, want)
		}
	}
}

func TestRuntimeMessage(t *testing.T) {
	for log, want := range map[string]string{
		`{"msg":"not found","level":"error"}`: "not found",
		"time=\"2026\" level=warning msg=\"x\"\ntime=\"2026\" level=error msg=\"exec: \\\"nope\\\": not found\"\n": `exec: "nope": not found`,
		"executable file `nope` not found\n": "executable file `nope` not found",
		"":                                   "",
	} {
		if got := runtimeMessage(log); got != want {
			t.Errorf("runtimeMessage(%q) = %q, want %q", log, got, want)
		}
	}
}

func FuzzRuntimeMessage(f *testing.F) {
	f.Add(`time="x" level=error msg="y"`)
	f.Add(`{"msg":1}`)
	f.Fuzz(func(_ *testing.T, log string) { runtimeMessage(log) })
}
