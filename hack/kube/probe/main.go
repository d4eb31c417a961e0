// Command probe runs one probe of a container as a kubelet does, with the packages of the kubelet:
//
//	probe POD-IP '{"grpc": {"port": 443, "mode": "TLS"}, "timeoutSeconds": 1}'
//
// It prints the result (success, failure, …) and the probe's output. The feature gates GRPCContainerProbeTLS and
// H2CContainerProbe count as enabled. Exec and tcpSocket probes are refused.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/pkg/probe"
	grpcprobe "k8s.io/kubernetes/pkg/probe/grpc"
	httpprobe "k8s.io/kubernetes/pkg/probe/http"
)

func main() {
	result, output, err := run(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
	fmt.Printf("%s: %s\n", result, output)
}

func run(args []string) (probe.Result, string, error) {
	if len(args) != 2 {
		return "", "", errors.New("usage: probe POD-IP PROBE")
	}
	p := &v1.Probe{TimeoutSeconds: 1}
	if err := json.Unmarshal([]byte(args[1]), p); err != nil {
		return "", "", err
	}
	host, timeout := args[0], time.Duration(p.TimeoutSeconds)*time.Second
	switch {
	case p.HTTPGet != nil:
		request, err := httpprobe.NewRequestForHTTPGetAction(p.HTTPGet, &v1.Container{}, host, "probe")
		if err != nil {
			return "", "", err
		}
		prober := httpprobe.New(false)
		if p.HTTPGet.Protocol != nil && *p.HTTPGet.Protocol == v1.HTTPProtocolHTTP2 {
			return prober.ProbeH2C(request, timeout)
		}
		return prober.Probe(request, timeout)
	case p.GRPC != nil:
		service := ""
		if p.GRPC.Service != nil {
			service = *p.GRPC.Service
		}
		overTLS := p.GRPC.Mode != nil && *p.GRPC.Mode == v1.GRPCProbeModeTLS
		return grpcprobe.New().Probe(host, service, int(p.GRPC.Port), timeout, grpcprobe.ProbeOptions{UseTLS: overTLS})
	}
	return "", "", errors.New("the probe is neither httpGet nor grpc")
}
