package builtin

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
)

// The structures in this file have the fields that this package implements. Decoding is strict: a configuration with
// any other field is left to the executable. Values are decoded as the plugins decode them.

// versions lists the supported CNI versions. For each of these versions, every plugin release from 1.0 on prints the
// same results.
var versions = []string{"0.3.0", "0.3.1", "0.4.0", "1.0.0"}

// common holds the fields of every plugin's configuration.
type common struct {
	Name         string          `json:"name"`
	CNIVersion   string          `json:"cniVersion"`
	Type         string          `json:"type"`
	Capabilities map[string]bool `json:"capabilities"`
	PrevResult   json.RawMessage `json:"prevResult"`
}

func (c *common) check() error {
	if string(c.PrevResult) == "null" {
		c.PrevResult = nil
	}
	if !slices.Contains(versions, c.CNIVersion) {
		return fmt.Errorf("cniVersion %q", c.CNIVersion)
	}
	if c.Name == "" {
		return errors.New("no name")
	}
	return nil
}

// bridgeConfig is the configuration of the bridge plugin. IPAM holds an ipamConfig.
type bridgeConfig struct {
	common
	Bridge           string          `json:"bridge"`
	IsGateway        bool            `json:"isGateway"`
	IsDefaultGateway bool            `json:"isDefaultGateway"`
	ForceAddress     bool            `json:"forceAddress"`
	IPMasq           bool            `json:"ipMasq"`
	MTU              int             `json:"mtu"`
	HairpinMode      bool            `json:"hairpinMode"`
	PromiscMode      bool            `json:"promiscMode"`
	Vlan             int             `json:"vlan"`
	DNS              types.DNS       `json:"dns"`
	IPAM             json.RawMessage `json:"ipam"`
	RuntimeConfig    struct{}        `json:"runtimeConfig"`
}

func (c *bridgeConfig) check() error {
	switch {
	case c.Vlan != 0:
		return errors.New("vlan")
	case c.HairpinMode && c.PromiscMode:
		return errors.New("hairpinMode with promiscMode")
	case c.MTU < 0:
		return errors.New("a negative mtu")
	}
	c.IsGateway = c.IsGateway || c.IsDefaultGateway
	c.Bridge = cmp.Or(c.Bridge, "cni0") // the plugin's default
	return c.common.check()
}

// rangeConfig is an address range in host-local's configuration.
type rangeConfig struct {
	Subnet     string `json:"subnet"`
	RangeStart string `json:"rangeStart"`
	RangeEnd   string `json:"rangeEnd"`
	Gateway    string `json:"gateway"`
}

// ipamConfig is the configuration of host-local. It is used only to check the type and the field names; host-local's
// own code reads the values.
type ipamConfig struct {
	rangeConfig
	Type    string          `json:"type"`
	DataDir string          `json:"dataDir"`
	Ranges  [][]rangeConfig `json:"ranges"`
	Routes  []struct {
		Dst string `json:"dst"`
		GW  string `json:"gw"`
	} `json:"routes"`
}

// loopbackConfig is the configuration of the loopback plugin.
type loopbackConfig struct {
	common
	RuntimeConfig struct{} `json:"runtimeConfig"`
}

// load decodes the configuration into conf and checks it.
func (c *Call) load(conf interface{ check() error }) error {
	if err := decodeStrict(c.stdin, conf); err != nil {
		return err
	}
	return conf.check()
}

// decodeStrict decodes data into v. It refuses unknown fields and trailing data.
func decodeStrict(data []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("trailing data after the configuration")
	}
	return nil
}

// knownArgs lists the names in CNI_ARGS that these plugins ignore. Other names are refused, because some of them, such
// as "MAC" and "IP", change what the plugins do.
var knownArgs = []string{"IgnoreUnknown", "K8S_POD_NAMESPACE", "K8S_POD_NAME", "K8S_POD_INFRA_CONTAINER_ID", "K8S_POD_UID"}

// checkArgs refuses CNI_ARGS that the plugins would not ignore.
func checkArgs(args string) error {
	if args == "" {
		return nil
	}
	ignore := false
	for pair := range strings.SplitSeq(args, ";") {
		name, value, ok := strings.Cut(pair, "=")
		if !ok || !slices.Contains(knownArgs, name) {
			return fmt.Errorf("argument %q", pair)
		}
		ignore = ignore || name == "IgnoreUnknown" && value == "1"
	}
	if !ignore {
		return errors.New("arguments without IgnoreUnknown=1")
	}
	return nil
}
