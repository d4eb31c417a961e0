#!/bin/bash
# setup.sh [bench | browser | debian | kubelet | mqtt | release | serve | templates]: install, as root, what building, testing and running Tripod needs on Debian 12. It is safe
# to repeat, and quick if everything is installed. It starts no service and changes no setting of the host.
#
# Additionally: "bench" installs what `make bench` compares with, "browser" a browser and gateways (1 GB), "debian" what hack/images/debian.sh needs for its image, and
# "kubelet" what a cluster needs beside the programs that hack/kube.sh builds, "mqtt" npm and Python's venv for MQTT clients, "release" what builds the Debian package,
# "serve" what `hack/bench.sh serve` compares with and by, "templates" npm, Python's venv, clang and Debian's Rust for new components.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=(
  # what a node runs
  runc crun conmon catatonit            # OCI runtimes, their monitor, the init of a shared PID namespace
  containernetworking-plugins iptables nftables iproute2
  qemu-system-x86 qemu-utils            # virtual machines (qemu-img is for the tests)
  ovmf                                  # UEFI for machines
  qemu-system-common                    # virtiofsd, which shares directories with machines
  erofs-utils                           # mkfs.erofs, which makes disks of images for machines that run containers
  # what the tests run
  openssh-client                        # the program that `tripod ssh` runs
  docker-registry skopeo                # the registry on loopback, and the tool that fills it
  gpg gpg-agent                         # skopeo's signatures of images
  openssl                               # keys, as users make them
  libvirt-daemon-system                 # libvirtd for the VM driver of that name; each test starts its own
  mosquitto mosquitto-clients           # an independent MQTT broker and clients; the service stays off, tests start their own
  redis-server                          # a store for components; the service stays off, tests start their own
  gcc libc6-dev                         # for tripod-wasm, whose engine is a C library, and go test -race
  cmake                                 # puts wasmtime's C headers into place
  cppcheck                              # the linter of the engine's C half
  curl                                  # an independent client of the pods
  nghttp2-client                        # an independent client of HTTP/2, and h2load for make bench
  jq procps util-linux ca-certificates xz-utils
  make git                              # the build itself
)
bench_packages=(containerd)
browser_packages=(chromium nginx haproxy)
kubelet_packages=(etcd-server dbus-daemon)
mqtt_packages=(python3-venv)
debian_packages=(mmdebstrap e2fsprogs)
release_packages=(dpkg-dev)
serve_packages=(wrk python3-venv)
templates_packages=(python3-venv clang-14 lld-14 wasi-libc libclang-rt-14-dev-wasm32 rustc cargo libstd-rust-dev-wasm32)
# The tests of internal/sandbox/linux run the host's busybox, from either of Debian's two packages.
[ -x /bin/busybox ] || packages+=(busybox)

die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

case ${1-} in
  '') ;;
  bench) packages+=("${bench_packages[@]}") ;;
  browser)
    packages+=("${browser_packages[@]}")
    command -v npm >/dev/null || packages+=(nodejs npm) # one from elsewhere than Debian is fine, too
    ;;
  debian) packages+=("${debian_packages[@]}") ;;
  kubelet) packages+=("${kubelet_packages[@]}") ;;
  mqtt | serve)
    [ "$1" = mqtt ] && packages+=("${mqtt_packages[@]}") || packages+=("${serve_packages[@]}")
    command -v npm >/dev/null || packages+=(nodejs npm)
    ;;
  release) packages+=("${release_packages[@]}") ;;
  templates)
    packages+=("${templates_packages[@]}")
    command -v npm >/dev/null || packages+=(nodejs npm)
    ;;
  *) die "unknown argument $1; usage: hack/setup.sh [bench | browser | debian | kubelet | mqtt | release | serve | templates]" ;;
esac

# missing prints the packages that are not installed.
missing() {
  dpkg-query -W -f '${db:Status-Status} ${Package}\n' "$@" 2>/dev/null | awk '$1 == "installed" {print $2}' |
    sort -u | comm -13 - <(printf '%s\n' "$@" | sort -u)
}

# install_packages installs packages without starting their services.
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
  hack/patience.sh 'setup: apt-get' "${apt[@]}" install -y --no-install-recommends "$@" </dev/null ||
    die "apt-get could not install: $*; the lines above say why"
}

# stay_off SERVICE: disable the service at boot, under either init system.
stay_off() {
  update-rc.d "$1" disable >/dev/null
}

command -v dpkg-query >/dev/null || die "this needs Debian (dpkg is missing); on another system install the equivalents of: ${packages[*]}"

# libvirtd needs the files of an init system, and apt would install systemd on a machine without it.
if ! dpkg-query -W -f '${db:Status-Status}\n' libvirt-daemon-system-systemd 2>/dev/null | grep -qx installed &&
  ! [ -d /run/systemd/system ]; then
  packages+=(libvirt-daemon-system-sysv)
fi

command -v go >/dev/null || die "Go $(awk '$1 == "go" {print $2}' go.mod) or later is needed and 'go' is not in PATH; see https://go.dev/dl"
[ -n "${1-}" ] || hack/engine.sh check

mapfile -t want < <(missing "${packages[@]}")
if [ ${#want[@]} -gt 0 ]; then
  [ "$(id -u)" = 0 ] || die "run this as root: ${want[*]} must be installed"
  echo "setup: installing ${want[*]}"
  install_packages "${want[@]}"
  # Only if it was just installed: an existing service is in use.
  [[ " ${want[*]} " != *" mosquitto "* ]] || stay_off mosquitto
  [[ " ${want[*]} " != *" redis-server "* ]] || stay_off redis-server
  [[ " ${want[*]} " != *" etcd-server "* ]] || stay_off etcd
  [[ " ${want[*]} " != *" nginx "* ]] || stay_off nginx
  [[ " ${want[*]} " != *" haproxy "* ]] || stay_off haproxy
  mapfile -t want < <(missing "${packages[@]}")
  [ ${#want[@]} -eq 0 ] || die "still not installed: ${want[*]}"
fi

# Download all crates and modules at once, so that everything else works offline. The stamp saves half a second of checking.
stamp=build/.modules
plugins=internal/cli/scaffold/plugins.mod # of `tripod component new`
if ! [ "$stamp" -nt go.sum ] || ! [ "$stamp" -nt internal/component/engine/wasmtime/Cargo.lock ] || ! [ "$stamp" -nt "$plugins" ] || ! [ -d "$(go env GOMODCACHE)/cache/download" ]; then
  { hack/engine.sh fetch && go mod download && for dir in sdk/go examples/wasm/greeter-go test/guests; do go -C "$dir" mod download || exit 1; done && go mod download -modfile="$plugins"; } || die "a download failed: the Go module proxy or crates.io cannot be reached, or go.sum does not match"
  mkdir -p build && touch "$stamp"
fi
