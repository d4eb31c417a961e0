package program

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// compileInput runs the compiler and returns its exit code, the code and its standard error.
func compileInput(t *testing.T, config workerapi.CompileConfig, wasm []byte) (int, []byte, string) {
	t.Helper()
	c := program(t, "compile", asJSON(t, config))
	var stderr bytes.Buffer
	c.Stdin, c.Stderr = bytes.NewReader(wasm), &stderr
	code, err := c.Output()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return c.ProcessState.ExitCode(), code, stderr.String()
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	return data
}

// TestI6_BadComponents covers row I6 of docs/faults.md: bad components are refused with a reason in one line.
func TestI6_BadComponents(t *testing.T) {
	greeter := read(t, examples+"greeter-c/greeter-c.wasm")
	foreign := bytes.ReplaceAll(greeter, []byte("tripod:grpc/"), []byte("tripod:grxx/"))
	for name, c := range map[string]struct {
		wasm []byte
		says string
	}{
		"empty":                 {nil, ""},
		"not wasm":              {[]byte("#!/bin/sh\necho hello\n"), ""},
		"truncated":             {greeter[:len(greeter)/2], ""},
		"unknown import":        {foreign, "tripod:grxx/"},
		"nothing in it":         {[]byte("\x00asm\x01\x00\x00\x00"), ""},
		"a section without end": {[]byte("\x00asm\x01\x00\x00\x00\x01\xff\xff\xff\xff\x0f"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			code, out, says := compileInput(t, workerapi.CompileConfig{}, c.wasm)
			require.Equal(t, workerapi.CompileInvalid, code, says)
			require.Empty(t, out)
			require.Equal(t, 1, strings.Count(says, "\n"), says)
			require.Contains(t, says, c.says)
			require.True(t, strings.HasPrefix(says, "tripod-wasm: "), says)
		})
	}
}

// TestI6_CompileBomb checks that input, memory and time of a compilation are bounded, and that the error names the
// exceeded limit.
func TestI6_CompileBomb(t *testing.T) {
	js := read(t, examples+"greeter-js/greeter-js.wasm")
	for name, c := range map[string]struct {
		config workerapi.CompileConfig
		says   string
	}{
		"input":  {workerapi.CompileConfig{MaxInput: 1000}, "1000 bytes"},
		"memory": {workerapi.CompileConfig{MaxMemory: 40 << 20}, "memory"},
	} {
		t.Run(name, func(t *testing.T) {
			begun := time.Now()
			code, out, says := compileInput(t, c.config, js)
			require.Equal(t, workerapi.CompileLimit, code, says)
			require.Empty(t, out)
			require.Equal(t, 1, strings.Count(says, "\n"), says)
			require.Contains(t, says, c.says)
			require.Less(t, time.Since(begun), 30*time.Second)
		})
	}
	t.Run("time", func(t *testing.T) {
		// No component here needs more than a second to compile, so a slow input reaches the limit.
		code, out, says := compileInput(t, workerapi.CompileConfig{MaxCPU: time.Nanosecond}, bomb(2_000_000))
		require.Equal(t, workerapi.CompileLimit, code, says)
		require.Empty(t, out)
		require.Contains(t, says, "CPU time")
	})
}

// bomb returns a core module with one function of n operations, which takes long to compile.
func bomb(n int) []byte {
	leb := func(v int) (b []byte) {
		for {
			c := byte(v & 0x7f)
			if v >>= 7; v == 0 {
				return append(b, c)
			}
			b = append(b, c|0x80)
		}
	}
	section := func(id byte, body []byte) []byte { return append(append([]byte{id}, leb(len(body))...), body...) }
	module := []byte("\x00asm\x01\x00\x00\x00")
	module = append(module, section(1, []byte("\x02\x60\x00\x00\x60\x01\x7f\x01\x7f"))...) // () -> (), (i32) -> i32
	const functions = 50
	types := leb(functions + 1)
	types = append(types, 0)
	for range functions {
		types = append(types, 1)
	}
	module = append(module, section(3, types)...)
	module = append(module, section(5, []byte("\x01\x00\x01"))...)                             // a memory
	module = append(module, section(7, []byte("\x02\x06_start\x00\x00\x06memory\x02\x00"))...) // exports
	code := leb(functions + 1)
	code = append(code, 2, 0, 0x0b)
	body := []byte{0, 0x20, 0}
	for range n / functions {
		body = append(body, 0x20, 0, 0x6c, 0x20, 0, 0x73, 0x20, 0, 0x6d) // * x ^ x / x
	}
	body = append(body, 0x0b)
	for range functions {
		code = append(append(code, leb(len(body))...), body...)
	}
	return append(module, section(10, code)...)
}

// TestFingerprint checks that the compiler and the worker report the same fingerprint.
func TestFingerprint(t *testing.T) {
	out, err := program(t, "fingerprint").Output()
	require.NoError(t, err)
	r := startWorker(t, workerapi.WorkerConfig{})
	require.Equal(t, r.Hello().Engine+"\n", string(out))
	require.Equal(t, workerapi.Version, r.Hello().Version)
}

func TestUsage(t *testing.T) {
	for _, args := range [][]string{nil, {"worker"}, {"worker", "not JSON"}, {"compile"}, {"fly", "{}"}} {
		c := program(t, args...)
		out, err := c.CombinedOutput()
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit)
		require.Equal(t, exitUsage, exit.ExitCode())
		require.Equal(t, 1, strings.Count(string(out), "\n"), "%s", out)
	}
}
