package cri

import (
	"context"
	"encoding/json"
	"fmt"
	"runtime"
	"slices"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/health"
	"github.com/tripod-run/tripod/internal/node"
)

// Status reports whether the node can run pods. It also lists the node's handlers and features.
func (s *Server) Status(ctx context.Context, req *runtimeapi.StatusRequest) (*runtimeapi.StatusResponse, error) {
	handlers := s.node.Handlers()
	conditions := []*runtimeapi.RuntimeCondition{runtimeReady(handlers), networkReady(s.node.NetworkReady(ctx))}
	if c := handlersReady(handlers); c != nil {
		conditions = append(conditions, c)
	}
	for _, p := range s.health.Problems() {
		conditions = withProblem(conditions, p)
	}
	resp := &runtimeapi.StatusResponse{
		Status:   &runtimeapi.RuntimeStatus{Conditions: conditions},
		Features: &runtimeapi.RuntimeFeatures{},
	}
	for _, h := range handlers {
		if h.Default {
			// The API has only one answer for the whole runtime, so give the default handler's.
			resp.Features.SupplementalGroupsPolicy = h.Capabilities.SupplementalGroupsPolicy
			resp.Features.MountOptions = h.Capabilities.MountOptions
			resp.Features.UserNamespacesHostNetwork = h.Capabilities.HostNetwork && h.Capabilities.MapsIDs
			resp.RuntimeHandlers = append(resp.RuntimeHandlers, runtimeHandler("", h))
		}
		resp.RuntimeHandlers = append(resp.RuntimeHandlers, runtimeHandler(h.Name, h))
	}
	if req.GetVerbose() {
		info, err := s.runtimeInfo(handlers)
		if err != nil {
			return nil, err
		}
		if err := s.verifyImages(ctx, info); err != nil {
			return nil, err
		}
		resp.Info = info
	}
	return resp, nil
}

// runtimeReady returns the condition RuntimeReady. The condition is false while the default handler cannot run pods,
// that is, while the handler's backend has not recovered or lacks a dependency.
func runtimeReady(handlers []node.HandlerInfo) *runtimeapi.RuntimeCondition {
	c := &runtimeapi.RuntimeCondition{Type: runtimeapi.RuntimeReady, Status: true}
	for _, h := range handlers {
		if h.Default && h.Err != nil {
			c.Status, c.Reason, c.Message = false, "BackendNotReady", h.Err.Error()
		}
	}
	return c
}

// withProblem sets the affected condition's status to false. The first problem of a condition sets the reason; each
// problem adds to the message.
func withProblem(conditions []*runtimeapi.RuntimeCondition, p health.Problem) []*runtimeapi.RuntimeCondition {
	text := p.Part + ": " + oneLine(p.Err.Error())
	at := slices.IndexFunc(conditions, func(c *runtimeapi.RuntimeCondition) bool { return c.Type == p.Condition })
	if at < 0 {
		return append(conditions, &runtimeapi.RuntimeCondition{Type: p.Condition, Reason: p.Reason, Message: text})
	}
	if c := conditions[at]; c.Status || c.Reason == "" {
		c.Status, c.Reason, c.Message = false, p.Reason, text
	} else {
		c.Message += "; " + text
	}
	return conditions
}

// If a handler other than the default cannot run pods, handlersReady returns the condition HandlersReady with the
// status false. Otherwise it returns nil. The kubelet ignores conditions with unknown names, so the node stays ready
// for all other pods.
func handlersReady(handlers []node.HandlerInfo) *runtimeapi.RuntimeCondition {
	var reasons []string
	for _, h := range handlers {
		if !h.Default && h.AliasOf == "" && h.Err != nil {
			reasons = append(reasons, h.Name+": "+h.Err.Error())
		}
	}
	if reasons == nil {
		return nil
	}
	return &runtimeapi.RuntimeCondition{
		Type: health.HandlersReady, Reason: "BackendNotReady", Message: strings.Join(reasons, "; "),
	}
}

func networkReady(err error) *runtimeapi.RuntimeCondition {
	c := &runtimeapi.RuntimeCondition{Type: runtimeapi.NetworkReady, Status: err == nil}
	if err != nil {
		c.Reason, c.Message = "NetworkNotReady", err.Error()
	}
	return c
}

func runtimeHandler(name string, h node.HandlerInfo) *runtimeapi.RuntimeHandler {
	return &runtimeapi.RuntimeHandler{Name: name, Features: &runtimeapi.RuntimeHandlerFeatures{
		RecursiveReadOnlyMounts: h.Capabilities.RecursiveReadOnlyMounts,
		UserNamespaces:          h.Capabilities.UserNamespaces,
	}}
}

// runtimeInfo returns the verbose part of Status as JSON documents.
func (s *Server) runtimeInfo(handlers []node.HandlerInfo) (map[string]string, error) {
	type handler struct {
		node.HandlerInfo
		Err string `json:",omitempty"`
	}
	infos := make([]handler, 0, len(handlers))
	for _, h := range handlers {
		info := handler{HandlerInfo: h}
		if h.Err != nil {
			info.Err = h.Err.Error()
		}
		infos = append(infos, info)
	}
	plugins := []string{}
	if s.plugins != nil {
		plugins = append(plugins, s.plugins()...)
	}
	config, err := json.Marshal(map[string]any{
		"version": s.version, "cgroupDriver": s.cgroupDriver.String(), "handlers": infos, "recoveredPanics": guard.Counts(),
		"nodePlugins": plugins,
	})
	if err != nil {
		return nil, fmt.Errorf("encode the runtime's configuration: %w", err)
	}
	golang, err := json.Marshal(runtime.Version())
	if err != nil {
		return nil, fmt.Errorf("encode the Go version: %w", err)
	}
	return map[string]string{"config": string(config), "golang": string(golang)}, nil
}
