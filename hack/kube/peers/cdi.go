package main

import (
	"encoding/json"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// cdiDir is one of the two directories where every runtime looks for CDI files.
const cdiDir = "/var/run/cdi"

// writeCDI writes a CDI file for one device: a device node, and variables and files of the container, which only a device
// for containers has.
func writeCDI(kind, name, device, inContainer string) error {
	edits := map[string]any{"deviceNodes": []map[string]string{{"path": inContainer, "hostPath": device}}}
	var st unix.Stat_t
	if err := unix.Stat(device, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFCHR {
		edits["env"] = []string{"CDI_DEVICE=" + name}
		edits["mounts"] = []map[string]any{{"hostPath": cdiFile(name), "containerPath": "/cdi.json", "options": []string{"ro", "bind"}}}
	}
	text, err := json.Marshal(map[string]any{
		"cdiVersion": "0.6.0", "kind": kind,
		"devices": []map[string]any{{"name": name, "containerEdits": edits}},
	})
	if err != nil {
		return err
	}
	if err := os.MkdirAll(cdiDir, 0o755); err != nil {
		return err
	}
	// A runtime may read the directory at any time.
	draft := cdiFile(name) + ".draft"
	if err := os.WriteFile(draft, text, 0o644); err != nil {
		return err
	}
	return os.Rename(draft, cdiFile(name))
}

func cdiFile(name string) string { return filepath.Join(cdiDir, name+".json") }
