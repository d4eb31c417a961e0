#!/bin/bash
# setup.sh [bench | debian | kubelet]: install what building, testing and running Tripod needs on Debian 12, as root. Safe to
# repeat; does nothing, quickly, when all is there. No service is started and none of the host's settings is changed.
#
# With "bench" also what `make bench` compares with, with "debian" what hack/images/debian.sh makes its image with, with
# "kubelet" what a cluster needs besides the programs that hack/kube.sh builds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=(
  # what a node runs
  runc crun conmon catatonit            # OCI runtimes, their monitor, the init of a shared PID namespace
  containernetworking-plugins iptables nftables iproute2
  qemu-system-x86 qemu-utils            # virtual machines (qemu-img is the tests')
  qemu-system-common                    # virtiofsd, by which they have directories
  # what the tests run
  docker-registry skopeo                # the registry on loopback, and what fills it
  libvirt-daemon-system                 # libvirtd for the VM driver of that name; each test starts one of its own
  mosquitto mosquitto-clients           # an MQTT broker and clients that are not ours; the service stays off, tests start their own
  gcc libc6-dev                         # tripod-wasm, whose engine is a C library; go test -race
  curl                                  # a client of the pods that is not ours
  jq procps util-linux ca-certificates xz-utils
  make git                              # the build itself
)
bench_packages=(containerd)
kubelet_packages=(etcd-server)
debian_packages=(mmdebstrap e2fsprogs)
# The tests of internal/sandbox/linux run the host's busybox, whichever of Debian's two packages it is from.
[ -x /bin/busybox ] || packages+=(busybox)

die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

case ${1-} in
  '') ;;
  bench) packages+=("${bench_packages[@]}") ;;
  debian) packages+=("${debian_packages[@]}") ;;
  kubelet) packages+=("${kubelet_packages[@]}") ;;
  *) die "unknown argument $1; usage: hack/setup.sh [bench | debian | kubelet]" ;;
esac

# missing prints those of the packages that are not installed.
missing() {
  dpkg-query -W -f '${db:Status-Status} ${Package}\n' "$@" 2>/dev/null | awk '$1 == "installed" {print $2}' |
    sort -u | comm -13 - <(printf '%s\n' "$@" | sort -u)
}

# install_packages installs them without starting the services that some of them bring.
install_packages() {
  local policy=/usr/sbin/policy-rc.d
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
  fi
  export DEBIAN_FRONTEND=noninteractive
  local apt=(apt-get -qq -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300)
  "${apt[@]}" update || die "apt-get update failed: this machine cannot reach a Debian mirror (see /etc/apt/sources.list)"
  "${apt[@]}" install -y --no-install-recommends "$@" </dev/null ||
    die "apt-get could not install: $*; the lines above say why"
}

# stay_off SERVICE: it does not begin with the next boot, under either init system.
stay_off() {
  update-rc.d "$1" disable >/dev/null
}

command -v dpkg-query >/dev/null || die "this needs Debian (dpkg is not there); on another system install the equivalents of: ${packages[*]}"

# libvirtd wants files for either init system, and apt's choice would bring systemd to a machine that has none.
if ! dpkg-query -W -f '${db:Status-Status}\n' libvirt-daemon-system-systemd 2>/dev/null | grep -qx installed &&
  ! [ -d /run/systemd/system ]; then
  packages+=(libvirt-daemon-system-sysv)
fi

command -v go >/dev/null || die "Go $(awk '$1 == "go" {print $2}' go.mod) or later is needed and 'go' is not in PATH; see https://go.dev/dl"

mapfile -t want < <(missing "${packages[@]}")
if [ ${#want[@]} -gt 0 ]; then
  [ "$(id -u)" = 0 ] || die "run this as root: to be installed are ${want[*]}"
  echo "setup: installing ${want[*]}"
  install_packages "${want[@]}"
  # Only where it came just now: a service that was here before is somebody's.
  [[ " ${want[*]} " != *" mosquitto "* ]] || stay_off mosquitto
  [[ " ${want[*]} " != *" etcd-server "* ]] || stay_off etcd
  mapfile -t want < <(missing "${packages[@]}")
  [ ${#want[@]} -eq 0 ] || die "still not installed: ${want[*]}"
fi

# The modules in one step, so that what follows works without a network. The stamp saves the half second of looking.
stamp=build/.modules
if ! [ "$stamp" -nt go.sum ] || ! [ -d "$(go env GOMODCACHE)/cache/download" ]; then
  go mod download || die "go mod download failed: the Go module proxy cannot be reached, or go.sum does not match"
  mkdir -p build && touch "$stamp"
fi
