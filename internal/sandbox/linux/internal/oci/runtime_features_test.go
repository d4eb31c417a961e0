package oci

import (
	"testing"

	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/spec"
)

func TestParseFeatures(t *testing.T) {
	for answer, want := range map[string]spec.Runtime{
		"": {}, "junk": {}, `{"ociVersionMax":"1.0.2-dev"}`: {}, `{"ociVersionMax":"1.1.0+dev"}`: {Processes: true},
		`{"ociVersionMax":"1.3.0","linux":{"memoryPolicy":{"modes":["MPOL_BIND"]},"netDevices":{"enabled":true}}}`: {Processes: true,
			MemoryPolicy: true, NetDevice: true},
		`{"ociVersionMax":"1.2.0","linux":{"netDevices":{"enabled":false}}}`: {Processes: true},
	} {
		if got := parseFeatures([]byte(answer)); got != want {
			t.Errorf("features %s: got %+v, want %+v", answer, got, want)
		}
	}
}
