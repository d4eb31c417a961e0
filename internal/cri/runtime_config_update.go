package cri

import (
	"context"
	"net/netip"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// UpdateRuntimeConfig receives the node's pod CIDR from the kubelet: one prefix, or one per address family, separated
// by a comma. An empty CIDR changes nothing.
func (s *Server) UpdateRuntimeConfig(_ context.Context,
	req *runtimeapi.UpdateRuntimeConfigRequest) (*runtimeapi.UpdateRuntimeConfigResponse, error) {
	cidr := req.GetRuntimeConfig().GetNetworkConfig().GetPodCidr()
	if cidr == "" {
		return &runtimeapi.UpdateRuntimeConfigResponse{}, nil
	}
	for part := range strings.SplitSeq(cidr, ",") {
		if _, err := netip.ParsePrefix(strings.TrimSpace(part)); err != nil {
			return nil, invalid("runtime_config.network_config.pod_cidr", "%q is not an address prefix such as 10.88.0.0/16", part)
		}
	}
	if err := s.node.SetPodCIDR(cidr); err != nil {
		return nil, err
	}
	return &runtimeapi.UpdateRuntimeConfigResponse{}, nil
}
