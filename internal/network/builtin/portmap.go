package builtin

import (
	"context"
	"encoding/json"
	"errors"
)

// portmapConfig is the portmap plugin's, for the pods that have no host port: owners' chains run it for every pod.
// Ports are iptables' rules, made by a dozen executions: there the plugin's own start does not count.
type portmapConfig struct {
	common
	SNAT          *bool `json:"snat"`
	RuntimeConfig struct {
		PortMappings []json.RawMessage `json:"portMappings"`
	} `json:"runtimeConfig"`
}

func (c *Call) planPortmap(add bool) error {
	conf := &portmapConfig{}
	if err := decodeStrict(c.stdin, conf); err != nil {
		return err
	}
	if err := conf.check(); err != nil {
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
