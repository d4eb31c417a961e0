#!/bin/bash
# guest.sh [PROGRAM [DIR]]: the guest of pods whose OCI containers run in a machine of their own, into DIR (build/guest): vmlinux
# (QEMU starts it by PVH), initrd (tripod-init, and the modules for the next), root.erofs (the read-only disk with everything else),
# and version (the kernel's, and a digest of the files). PROGRAM (build/bin/tripod-guest) becomes the guest's
# /usr/bin/tripod-guest. The rest is from Debian's packages, unpacked by hack/images (ociguest.go). The same inputs give the
# same bytes, and nothing is built twice.
#
# Its kernel command line is guestCmdline (internal/sandbox/vm/oci/guest.go). Without the self-tests of ciphers
# (cryptomgr.notests), an emulated machine boots 0.3 s sooner. tsc=, i8042.*, rcupdate.rcu_expedited, lsm= and nokaslr made no measurable difference,
# nor did modules without signatures and BTF.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
program=${1:-build/bin/tripod-guest} dir=${2:-build/guest}
[ -f "$program" ] || { echo "guest: $program is missing; run make build, or name the program" >&2; exit 1; }
export CGO_ENABLED=0
go build -trimpath -buildvcs=false -ldflags '-s -w -buildid=' -o "$dir/tripod-init" ./cmd/tripod-init
go build -o build/bin/images ./hack/images
exec build/bin/images guest "$dir" "$dir/tripod-init" "$program"
