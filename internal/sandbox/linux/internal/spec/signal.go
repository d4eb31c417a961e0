package spec

import (
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The range of real-time signals that programs can use; glibc and musl reserve the first two (signal(7)).
const (
	sigRTMin = 34
	sigRTMax = 64
)

// stopSignal returns the signal that asks the container to end: the request's signal, otherwise the image's, otherwise
// SIGTERM.
func stopSignal(requested runtimeapi.Signal, image string) (runtimeapi.Signal, error) {
	if requested != runtimeapi.Signal_SIGNAL_RUNTIME_DEFAULT {
		return requested, checkStopSignal(requested)
	}
	if image == "" {
		return runtimeapi.Signal_SIGNAL_SIGTERM, nil
	}
	return parseSignal(image)
}

func checkStopSignal(s runtimeapi.Signal) error {
	if _, ok := runtimeapi.Signal_name[int32(s)]; !ok {
		return invalid("stop_signal", "unknown signal %d", s)
	}
	return nil
}

// parseSignal parses an image's StopSignal: SIGTERM, TERM, 15, SIGRTMIN+3 (OCI image-spec, config.md).
func parseSignal(s string) (runtimeapi.Signal, error) {
	name := strings.ToUpper(strings.TrimSpace(s))
	if n, err := strconv.Atoi(name); err == nil {
		for candidate := range runtimeapi.Signal_name {
			sig := runtimeapi.Signal(candidate)
			// Some numbers have two names (CLD and CHLD, IOT and ABRT, POLL and IO). Use the one that is not an alias.
			if sig != runtimeapi.Signal_SIGNAL_RUNTIME_DEFAULT && int(SignalNumber(sig)) == n && !isAlias(sig) {
				return sig, nil
			}
		}
		return 0, invalid("image StopSignal", "%q is not a signal", s)
	}
	name = strings.NewReplacer("+", "PLUS", "-", "MINUS").Replace("SIG" + strings.TrimPrefix(name, "SIG"))
	sig, ok := runtimeapi.Signal_value["SIGNAL_"+name]
	if !ok || sig == 0 {
		return 0, invalid("image StopSignal", "%q is not a signal", s)
	}
	return runtimeapi.Signal(sig), nil
}

func isAlias(s runtimeapi.Signal) bool {
	switch s {
	case runtimeapi.Signal_SIGNAL_SIGCLD, runtimeapi.Signal_SIGNAL_SIGIOT, runtimeapi.Signal_SIGNAL_SIGPOLL:
		return true
	}
	return false
}

// SignalNumber returns the kernel's number for a signal. For SIGNAL_RUNTIME_DEFAULT and unknown signals, it returns
// SIGTERM.
func SignalNumber(s runtimeapi.Signal) syscall.Signal {
	name := strings.TrimPrefix(s.String(), "SIGNAL_")
	if offset, ok := strings.CutPrefix(name, "SIGRTMINPLUS"); ok {
		n, _ := strconv.Atoi(offset)
		return syscall.Signal(sigRTMin + n)
	}
	if offset, ok := strings.CutPrefix(name, "SIGRTMAXMINUS"); ok {
		n, _ := strconv.Atoi(offset)
		return syscall.Signal(sigRTMax - n)
	}
	switch name {
	case "SIGRTMIN":
		return sigRTMin
	case "SIGRTMAX":
		return sigRTMax
	case "SIGCLD":
		return unix.SIGCHLD
	case "SIGIOT":
		return unix.SIGABRT
	case "SIGPOLL":
		return unix.SIGIO
	}
	if n := unix.SignalNum(name); n != 0 {
		return n
	}
	return unix.SIGTERM
}
