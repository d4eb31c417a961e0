package cloudinit

import (
	"testing"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
)

// TestNeutral: machines share a template whatever their names, keys, environment, networks and volumes are, but not if their user
// data differ.
func TestNeutral(t *testing.T) {
	build := func(change func(*Input)) string {
		in := Input{Options: annotations.Options{ImageType: annotations.NoCloud}, PodUID: "uid", Hostname: "name", Agent: true}
		change(&in)
		made, err := Build(in.Neutral())
		if err != nil {
			t.Fatal(err)
		}
		return string(made.Bytes)
	}
	plain := build(func(*Input) {})
	for what, c := range map[string]struct {
		change func(*Input)
		same   bool
	}{
		"own": {func(in *Input) {
			in.PodUID, in.Hostname, in.Env = "other", "other", []EnvVar{{Name: "A", Value: "secret"}}
			in.Options.SSHKeys, in.DNS.Servers = []string{"ssh-ed25519 AAAA"}, []string{"10.0.0.1"}
			in.Mounts = []Mount{{HostPath: "/a", ContainerPath: "/b"}}
		}, true},
		"user data": {func(in *Input) { in.Options.UserData = map[string]any{"packages": []any{"nginx"}} }, false},
		"script":    {func(in *Input) { in.Options.UserDataScript = "#!/bin/sh\n" }, false},
		"meta-data": {func(in *Input) { in.Options.MetaData = map[string]any{"zone": "a"} }, false},
		"form":      {func(in *Input) { in.Options.ImageType = annotations.ConfigDrive }, false},
		"agent":     {func(in *Input) { in.Agent = false }, false},
	} {
		if same := build(c.change) == plain; same != c.same {
			t.Errorf("%s: the same template: got %t, want %t", what, same, c.same)
		}
	}
}
