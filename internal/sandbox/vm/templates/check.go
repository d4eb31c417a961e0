package templates

import (
	"fmt"
	"time"

	"github.com/tripod-run/tripod/internal/health"
)

// Check says which templates the handler with the given root directory has. Without templates there is no finding.
func Check(handler, root string) []health.Finding {
	list, err := List(root)
	if err != nil {
		return []health.Finding{{Subject: handler + " templates", Detail: err.Error(),
			Remedy: fmt.Sprintf("machines of the handler %q boot until the directory can be read", handler)}}
	}
	if len(list) == 0 {
		return nil
	}
	var size int64
	oldest := list[0].CreatedAt
	for _, t := range list {
		size += t.Size
		if t.CreatedAt.Before(oldest) {
			oldest = t.CreatedAt
		}
	}
	return []health.Finding{{Subject: handler + " templates", OK: true,
		Detail: fmt.Sprintf("%d ready, %d MiB on disk, the oldest from %s; last used %s",
			len(list), size>>20, oldest.UTC().Format(time.RFC3339), list[0].UsedAt.UTC().Format(time.RFC3339))}}
}
