package guestapi

import (
	"encoding/json"
	"net/netip"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// Pod is a sandbox.Pod that is encoded as JSON. Its configuration is protobuf in the JSON, because JSON changes values that
// are not UTF-8.
type Pod struct {
	sandbox.Pod
	// CPUs is how many CPUs the guest has to put online; 0 means those that are.
	CPUs int
}

type podJSON struct {
	ID      string       `json:"id"`
	Handler string       `json:"handler"`
	Config  []byte       `json:"config"`
	Netns   string       `json:"netns"`
	IPs     []netip.Addr `json:"ips"`
	CPUs    int          `json:"cpus,omitempty"`
}

func (p Pod) MarshalJSON() ([]byte, error) {
	config, err := proto.Marshal(p.Config)
	if err != nil {
		return nil, err
	}
	return json.Marshal(podJSON{p.ID, p.Handler, config, p.Netns, p.IPs, p.CPUs})
}

func (p *Pod) UnmarshalJSON(raw []byte) error {
	var j podJSON
	if err := json.Unmarshal(raw, &j); err != nil {
		return err
	}
	p.CPUs = j.CPUs
	p.Pod = sandbox.Pod{ID: j.ID, Handler: j.Handler, Config: &runtimeapi.PodSandboxConfig{}, Netns: j.Netns, IPs: j.IPs}
	return proto.Unmarshal(j.Config, p.Config)
}

// Container is a sandbox.Container that is encoded as JSON like a Pod.
type Container struct{ sandbox.Container }

type containerJSON struct {
	ID         string `json:"id"`
	Config     []byte `json:"config"`
	ImageID    string `json:"imageID"`
	Adjustment []byte `json:"adjustment,omitempty"`
}

func (c Container) MarshalJSON() ([]byte, error) {
	j := containerJSON{ID: c.ID, ImageID: c.ImageID}
	var err error
	if j.Config, err = proto.Marshal(c.Config); err != nil {
		return nil, err
	}
	if c.Adjustment != nil {
		if j.Adjustment, err = proto.Marshal(c.Adjustment); err != nil {
			return nil, err
		}
	}
	return json.Marshal(j)
}

func (c *Container) UnmarshalJSON(raw []byte) error {
	var j containerJSON
	if err := json.Unmarshal(raw, &j); err != nil {
		return err
	}
	c.Container = sandbox.Container{ID: j.ID, ImageID: j.ImageID, Config: &runtimeapi.ContainerConfig{}}
	if j.Adjustment != nil {
		c.Adjustment = &nri.ContainerAdjustment{}
		if err := proto.Unmarshal(j.Adjustment, c.Adjustment); err != nil {
			return err
		}
	}
	return proto.Unmarshal(j.Config, c.Config)
}
