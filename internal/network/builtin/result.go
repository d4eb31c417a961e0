package builtin

import (
	"bytes"
	"encoding/json"
	"fmt"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"
)

// print is the result in the form of the configuration's version.
func printResult(result *types100.Result, version string) ([]byte, error) {
	result.CNIVersion = types100.ImplementedSpecVersion
	converted, err := result.GetAsVersion(version)
	if err != nil {
		return nil, fmt.Errorf("result in version %s: %w", version, err)
	}
	var out bytes.Buffer
	err = converted.PrintTo(&out)
	return out.Bytes(), err
}

// passOn is the result of a chained plugin that adds nothing to what it was given.
func printPrevious(previous json.RawMessage, version string) ([]byte, error) {
	given, err := create.Create(version, previous)
	if err != nil {
		return nil, fmt.Errorf("prevResult: %w", err)
	}
	converted, err := given.GetAsVersion(version)
	if err != nil {
		return nil, fmt.Errorf("prevResult in version %s: %w", version, err)
	}
	var out bytes.Buffer
	err = converted.PrintTo(&out)
	return out.Bytes(), err
}
