package edge

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"

	"github.com/tripod-run/tripod/internal/atomicfile"
	"github.com/tripod-run/tripod/internal/config"
)

// identity holds the UUIDs of the manager and, by name, of its runtimes. They must not change, because an orchestrator
// knows the node by them.
type identity struct {
	Manager  string            `json:"manager"`
	Runtimes map[string]string `json:"runtimes"`
}

// identify reads the identity from the file. UUIDs in the configuration replace those in the file. identify then makes
// missing UUIDs, and saves the identity if it has changed.
func identify(file string, c config.Edge) (identity, error) {
	id := identity{Runtimes: map[string]string{}}
	text, err := os.ReadFile(file)
	if err == nil {
		if err = json.Unmarshal(text, &id); err != nil {
			err = fmt.Errorf("%w: %w", err, errdefs.ErrDataLoss)
		}
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return id, fmt.Errorf("the edge's identity: %s: %w; restore the file, or set edge.uuid and the runtimes' uuid and remove it", file, err)
	}
	before := len(id.Runtimes)
	changed := choose(&id.Manager, c.UUID)
	names := map[string]string{}
	if c.Wasm.Enabled {
		names[c.Wasm.Name] = ""
	}
	for _, r := range c.Runtimes {
		names[r.Name] = r.UUID
	}
	for name, wanted := range names {
		known := id.Runtimes[name]
		changed = choose(&known, wanted) || changed
		id.Runtimes[name] = known
	}
	if !changed && before == len(id.Runtimes) {
		return id, nil
	}
	if text, err = json.MarshalIndent(id, "", "  "); err != nil {
		return id, err
	}
	return id, atomicfile.Write(file, append(text, '\n'), 0o600)
}

// choose sets *id to wanted, or to a new UUID if both are empty. It reports whether *id has changed.
func choose(id *string, wanted string) bool {
	before := *id
	switch {
	case wanted != "":
		*id = wanted
	case *id == "":
		*id = uuid.NewString()
	}
	return *id != before
}
