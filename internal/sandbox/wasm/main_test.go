package wasm

import (
	"testing"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/test/workertest"
	"github.com/tripod-run/tripod/test/races"
)

func TestMain(m *testing.M) {
	programEnv = []string{races.Env()}
	workertest.Main(m)
}
