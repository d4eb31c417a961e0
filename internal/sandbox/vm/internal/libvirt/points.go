package libvirt

import "github.com/tripod-run/tripod/internal/failpoint"

var (
	fpDefined   = failpoint.New("libvirt.define.domain")
	fpUndefined = failpoint.New("libvirt.undefine.forgotten")
	fpOpened    = failpoint.New("libvirt.start.opened")
	fpReady     = failpoint.New("libvirt.start.defined")
	fpGranted   = failpoint.New("libvirt.start.granted")
	fpCreated   = failpoint.New("libvirt.start.created")
	fpKnown     = failpoint.New("libvirt.end.known")
	fpWritten   = failpoint.New("libvirt.end.written")
	fpKilling   = failpoint.New("libvirt.destroy.intent")
	fpKilled    = failpoint.New("libvirt.destroy.dead")
)
