package guestnode

import "github.com/tripod-run/tripod/internal/failpoint"

// The fail points are between what a call changes and what records or answers it. The backend has its own.
var (
	fpPodRecorded       = failpoint.New("vm-guest.set-up.recorded")
	fpPodMade           = failpoint.New("vm-guest.set-up.made")
	fpImagesMounted     = failpoint.New("vm-guest.create.mounted")
	fpContainerRecorded = failpoint.New("vm-guest.create.recorded")
	fpContainerMade     = failpoint.New("vm-guest.create.made")
	fpStarted           = failpoint.New("vm-guest.start.started")
	fpStopped           = failpoint.New("vm-guest.stop.stopped")
	fpUpdated           = failpoint.New("vm-guest.update.applied")
	fpUpdateRecorded    = failpoint.New("vm-guest.update.recorded")
	fpPodUpdated        = failpoint.New("vm-guest.update-pod.applied")
	fpRemoved           = failpoint.New("vm-guest.remove.removed")
	fpForgotten         = failpoint.New("vm-guest.remove.forgotten")
	fpMeasured          = failpoint.New("vm-guest.stats.measured")
	fpLogSent           = failpoint.New("vm-guest.log.sent")
	fpEvent             = failpoint.New("vm-guest.events.event")
)
