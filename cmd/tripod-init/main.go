// tripod-init is the first process of the guest that runs the containers of a pod of the kind vm-oci. hack/guest.sh puts
// it into the guest's initramfs as /init. It is also the guest's modprobe, which the kernel runs to load modules.
package main

import (
	"os"

	"github.com/tripod-run/tripod/internal/sandbox/vm/guestinit"
)

func main() {
	if os.Getpid() == 1 {
		guestinit.Run()
	}
	os.Exit(guestinit.Modprobe(os.Args[1:]))
}
