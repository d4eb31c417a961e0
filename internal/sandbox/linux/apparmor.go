package linux

import (
	"context"
	"log/slog"
	"time"

	"github.com/tripod-run/tripod/internal/health"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/apparmor"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/spec"
)

// parserDeadline limits how long the parser can take. It takes well below a second on an idle node.
const parserDeadline = 20 * time.Second

// loadDefaultProfile loads the default AppArmor profile and returns its name. It returns "" if the kernel has no
// AppArmor, or if the profile cannot be loaded: containers that ask for the default profile are then refused.
func loadDefaultProfile(ctx context.Context, host spec.Host, log *slog.Logger) string {
	if !host.AppArmor {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, parserDeadline)
	defer cancel()
	parser, err := apparmor.FindParser()
	if err == nil {
		err = apparmor.LoadDefault(ctx, "/", parser)
	}
	if err != nil {
		log.Warn("containers have no default AppArmor profile", "err", err)
		return ""
	}
	return apparmor.DefaultProfile
}

// appArmorFinding reports whether the default profile can be loaded, without loading it.
func appArmorFinding(host spec.Host) health.Finding {
	f := health.Finding{Subject: "AppArmor", OK: true, Detail: "the kernel has none: containers with the default profile have no profile, and other profiles are refused"}
	if !host.AppArmor {
		return f
	}
	f.Detail = "default profile " + apparmor.DefaultProfile
	if _, err := apparmor.FindParser(); err != nil {
		f.OK, f.Detail, f.Remedy = false, err.Error()+": containers that ask for the default profile are refused", "apt-get install apparmor"
	}
	return f
}
