package cli

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"sigs.k8s.io/yaml"
)

// readMessage reads a CRI message from a JSON or YAML file; field names may have either form (log_path, logPath).
// Unknown fields are errors. Values of environment variables are plain text, as in every example of a container
// configuration. The CRI declares them as bytes, so protojson alone would expect base64.
func readMessage(path string, into proto.Message) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var document any
	if err := yaml.UnmarshalStrict(text, &document); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	fields, ok := document.(map[string]any)
	if !ok {
		return fmt.Errorf("%s: not an object", path)
	}
	if err := encodeEnvs(fields); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	encoded, err := json.Marshal(fields)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if err := protojson.Unmarshal(encoded, into); err != nil {
		return fmt.Errorf("%s: not a %s: %w", path, into.ProtoReflect().Descriptor().Name(), err)
	}
	return nil
}

func encodeEnvs(fields map[string]any) error {
	envs, ok := fields["envs"].([]any)
	if !ok {
		return nil
	}
	for i, e := range envs {
		env, ok := e.(map[string]any)
		if !ok {
			return fmt.Errorf("envs[%d] is not an object with key and value", i)
		}
		switch value := env["value"].(type) {
		case nil:
		case string:
			env["value"] = base64.StdEncoding.EncodeToString([]byte(value))
		default:
			return fmt.Errorf("envs[%d].value is not a string; put it in quotes", i)
		}
	}
	return nil
}
