package apparmor

import (
	"context"
	"log/slog"
	"time"

	"github.com/tripod-run/tripod/internal/health"
)

// parserDeadline limits how long the parser can take. It takes well below a second on an idle node.
const parserDeadline = 20 * time.Second

// Setup loads the default profile and returns its name. It returns "" if the kernel has no AppArmor, or if the profile
// cannot be loaded, which it logs: containers that ask for the default profile are then refused.
func Setup(ctx context.Context, enabled bool, log *slog.Logger) string {
	if !enabled {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, parserDeadline)
	defer cancel()
	parser, err := FindParser()
	if err == nil {
		err = LoadDefault(ctx, "/", parser)
	}
	if err != nil {
		log.Warn("containers have no default AppArmor profile", "err", err)
		return ""
	}
	return DefaultProfile
}

// Finding reports whether the default profile can be loaded, without loading it.
func Finding(enabled bool) health.Finding {
	f := health.Finding{Subject: "AppArmor", OK: true,
		Detail: "the kernel has none: containers with the default profile have no profile, and other profiles are refused"}
	if !enabled {
		return f
	}
	f.Detail = "default profile " + DefaultProfile
	if _, err := FindParser(); err != nil {
		f.OK, f.Detail, f.Remedy = false, err.Error()+": containers that ask for the default profile are refused", "apt-get install apparmor"
	}
	return f
}
