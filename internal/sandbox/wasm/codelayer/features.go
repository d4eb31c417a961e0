package codelayer

import (
	"runtime"

	"golang.org/x/sys/cpu"
)

// HostFeatures returns the features of this machine's processor that the engine's compiler uses where it finds them, by
// their names in Linux. The list is never nil. The engine compares the features with the processor again when it loads
// code, which covers architectures without a list here.
func HostFeatures() []string {
	features := []string{}
	for _, f := range compilerFeatures[runtime.GOARCH] {
		if *f.present {
			features = append(features, f.name)
		}
	}
	return features
}

type feature struct {
	name    string
	present *bool
}

// compilerFeatures lists what Cranelift detects (cranelift-native 0.126, infer_native_flags), by architecture.
var compilerFeatures = map[string][]feature{
	"amd64": {
		{"sse3", &cpu.X86.HasSSE3}, {"ssse3", &cpu.X86.HasSSSE3}, {"cx16", &cpu.X86.HasCX16}, {"sse4_1", &cpu.X86.HasSSE41},
		{"sse4_2", &cpu.X86.HasSSE42}, {"popcnt", &cpu.X86.HasPOPCNT}, {"avx", &cpu.X86.HasAVX}, {"avx2", &cpu.X86.HasAVX2},
		{"fma", &cpu.X86.HasFMA}, {"bmi1", &cpu.X86.HasBMI1}, {"bmi2", &cpu.X86.HasBMI2}, {"lzcnt", &cpu.X86.HasLZCNT},
		{"avx512f", &cpu.X86.HasAVX512F}, {"avx512dq", &cpu.X86.HasAVX512DQ}, {"avx512vl", &cpu.X86.HasAVX512VL},
		{"avx512vbmi", &cpu.X86.HasAVX512VBMI}, {"avx512_bitalg", &cpu.X86.HasAVX512BITALG},
	},
	"arm64": {{"atomics", &cpu.ARM64.HasATOMICS}},
}
