package qemu

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/test/machinetest"
)

func TestMain(m *testing.M) {
	if raw := os.Getenv(victimEnv); raw != "" {
		var v victim
		if err := errors.Join(json.Unmarshal([]byte(raw), &v), v.live()); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(1)
	}
	machinetest.Main(m)
}
