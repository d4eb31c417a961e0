package builtin

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"
)

// printResult encodes a result in the given CNI version.
func printResult(result *types100.Result, version string) ([]byte, error) {
	result.CNIVersion = types100.ImplementedSpecVersion
	return printAs(result, version)
}

// printPrevious encodes the previous result again, for a chained plugin that adds nothing to it.
func printPrevious(previous json.RawMessage, version string) ([]byte, error) {
	given, err := create.Create(version, previous)
	if err != nil {
		return nil, fmt.Errorf("prevResult: %w", err)
	}
	return printAs(given, version)
}

func printAs(result types.Result, version string) ([]byte, error) {
	converted, err := result.GetAsVersion(version)
	if err != nil {
		return nil, fmt.Errorf("result in version %s: %w", version, err)
	}
	var out bytes.Buffer
	err = converted.PrintTo(&out)
	return out.Bytes(), err
}
