package harness

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Manifests reads a document in the directory docs and returns its YAML blocks for kubectl, unchanged. These are the
// blocks that begin with an apiVersion, except the kubelet's configuration.
func Manifests(document string) ([]string, error) {
	data, err := os.ReadFile(filepath.Join(Root(), "docs", document))
	if err != nil {
		return nil, err
	}
	var found []string
	for _, part := range strings.Split("\n"+string(data), "\n```yaml\n")[1:] {
		block, _, closed := strings.Cut(part, "\n```\n")
		if !closed {
			return nil, fmt.Errorf("docs/%s: a YAML block is not closed", document)
		}
		if strings.HasPrefix(block, "apiVersion: ") && !strings.HasPrefix(block, "apiVersion: kubelet.config.k8s.io/") {
			found = append(found, block+"\n")
		}
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("docs/%s has no manifest", document)
	}
	return found, nil
}
