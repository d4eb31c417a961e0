package builtin

import (
	"context"
	"encoding/json"
	"errors"
)

// portmapConfig is the configuration of the portmap plugin. Most chains run portmap even for pods without host ports, so
// this package handles those pods itself. Pods with host ports are left to the plugin, which runs iptables a dozen times
// for each, so the cost of starting the plugin itself hardly matters.
type portmapConfig struct {
	common
	SNAT          *bool `json:"snat"`
	RuntimeConfig struct {
		PortMappings []json.RawMessage `json:"portMappings"`
	} `json:"runtimeConfig"`
}

func (c *Call) planPortmap(add bool) error {
	conf := &portmapConfig{}
	if err := c.load(conf); err != nil {
		return err
	}
	if len(conf.RuntimeConfig.PortMappings) > 0 {
		return errors.New("host ports")
	}
	if add && conf.PrevResult == nil {
		return errors.New("no prevResult")
	}
	c.run = func(context.Context) ([]byte, error) {
		if !add {
			return nil, nil
		}
		return printPrevious(conf.PrevResult, conf.CNIVersion)
	}
	return nil
}
