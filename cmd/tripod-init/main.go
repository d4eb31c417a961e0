// tripod-init is the first process of the guest that runs the containers of a pod of the kind vm-oci. hack/guest.sh puts
// it into the guest's initramfs as /init. It takes no arguments.
package main

import "github.com/tripod-run/tripod/internal/sandbox/vm/guestinit"

func main() { guestinit.Run() }
