#!/bin/bash
# kube.sh build [e2e]       build the programs of Kubernetes into a cache outside of the tree; nothing, quickly, when they are there
# kube.sh check [e2e]       print the cache's directory, or say what is missing
# kube.sh up                start a cluster of one node that stays, with a registry of test images
# kube.sh kubectl ARG...    kubectl, as the administrator of that cluster
# kube.sh sh [COMMAND]      a shell, or a command, in the world of that cluster; kubectl and tripod are in PATH
# kube.sh down              end it and clean up
#
# With e2e, the programs of Kubernetes' end-to-end tests are among them.
#
# The cache is TRIPOD_KUBE_CACHE (/var/cache/tripod/kube), with a directory per version. The cluster runs in namespaces of
# its own (hack/testns.sh) and is gone afterwards.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

programs=(kubelet kubectl kube-apiserver kube-controller-manager kube-scheduler kube-proxy)
e2e_programs=(e2e.test ginkgo agnhost)
version=$(awk '$1 == "k8s.io/kubernetes" || $2 == "k8s.io/kubernetes" {print $NF; exit}' hack/kube/go.mod)
cache=${TRIPOD_KUBE_CACHE:-/var/cache/tripod/kube}/$version
pidfile=build/kube.pid
log=build/kube.log

say()  { printf 'kube: %s\n' "$*"; }
fail() { say "$*" >&2; exit 1; }

# ---------------------------------------------------------------------------------------------- the programs

# missing prints those of the programs that the cache does not have.
missing() {
  local p
  for p in "${programs[@]}"; do [ -x "$cache/$p" ] || echo "$p"; done
}

# ldflags link the version in, which Kubernetes' own build takes from git.
ldflags() {
  local p number=${version#v}
  printf '%s' '-s -w'
  for p in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    printf ' -X %s.%s' "$p" "gitVersion=$version" "$p" "gitMajor=${number%%.*}" "$p" "gitMinor=$(cut -d. -f2 <<<"$number")" \
      "$p" "gitCommit=$(printf '0%.0s' {1..40})" "$p" gitTreeState=clean
  done
}

# compile PROGRAM FILE
compile() {
  local command=(go build) package=k8s.io/kubernetes/cmd/$1
  case $1 in
    e2e.test) command=(go test -c -vet off) package=k8s.io/kubernetes/test/e2e ;;
    ginkgo) package=github.com/onsi/ginkgo/v2/ginkgo ;;
    agnhost) package=k8s.io/kubernetes/test/images/agnhost ;;
  esac
  (cd hack/kube && CGO_ENABLED=0 nice "${command[@]}" -trimpath -ldflags "$(ldflags)" -o "$2" "$package")
}

build() {
  local want p began
  mapfile -t want < <(missing)
  [ ${#want[@]} -gt 0 ] || return 0
  mkdir -p "$cache"
  say "building ${want[*]} $version from the Go module proxy into $cache: once, a quarter of an hour on two cores"
  for p in "${want[@]}"; do
    began=$SECONDS
    # Under another name first, so that a build that is broken off leaves nothing that looks complete.
    compile "$p" "$cache/.$p"
    mv "$cache/.$p" "$cache/$p"
    say "$p is built, $((SECONDS - began)) s"
  done
}

check() {
  local want
  mapfile -t want < <(missing)
  [ ${#want[@]} = 0 ] || fail "$cache lacks ${want[*]}; hack/kube.sh build${1:+ $1} makes them, once, in a quarter of an hour"
  command -v etcd >/dev/null || fail "etcd is not there; hack/setup.sh kubelet installs it"
  echo "$cache"
}

# ---------------------------------------------------------------------------------------------- a cluster that stays

running() { [ -s $pidfile ] && kill -0 "$(cat $pidfile)" 2>/dev/null; }

# first prints the first process inside of the cluster's namespaces, which is testns' child.
first() {
  local init
  running && init=$(pgrep -P "$(cat $pidfile)") && [ -n "$init" ] && echo "$init"
}

up() {
  ! running || fail "it is up already (process $(cat $pidfile)); end it with: $0 down"
  check >/dev/null
  hack/images.sh build
  CGO_ENABLED=0 go build -o build/bin/kubenode ./hack/kubenode
  say "starting the cluster, half a minute on a quiet machine"
  setsid hack/testns.sh "$PWD/build/bin/kubenode" >$log 2>&1 </dev/null &
  echo $! >$pidfile
  until is_up; do
    running || fail "the cluster did not come up: $(cat $log)"
    sleep 0.2
  done
  cat <<TEXT
A cluster of one node is up in namespaces of its own, with RuntimeClasses linux, wasm and vm. Try:

  hack/kube.sh kubectl get nodes -o wide
  hack/kube.sh kubectl create deployment web --image registry.k8s.io/e2e-test-images/nginx:1.14-2
  hack/kube.sh sh           # a shell in there, with kubectl and tripod; every image of build/images/images.txt can be pulled
  make kubelet-down         # end it and clean up
TEXT
}

is_up() { enter sh -c 'test -e "$KUBECONFIG"' 2>/dev/null; }

# enter COMMAND...: run it in the namespaces of the cluster that stays.
enter() {
  local pid dir
  pid=$(first) || return 1
  dir=$(tr '\0' '\n' <"/proc/$pid/environ" | sed -n 's/^TRIPOD_TEST_DIR=//p')
  nsenter -t "$pid" -m -n -p -i -u -- env PATH="$PWD/build/bin:$cache:$PATH" TRIPOD_TEST_DIR="$dir" KUBECONFIG="$dir/kubeconfig" "$@"
}

enter_or_fail() {
  running || fail "nothing is up; start it with: make kubelet-up"
  enter "$@"
}

down() {
  running || { say "nothing is up"; return; }
  local pid; pid=$(cat $pidfile)
  kill "$pid"
  while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
  rm -f $pidfile
  say "the cluster has ended; its pods went with it"
}

# ---------------------------------------------------------------------------------------------- start here

case ${1-} in
  build | check)
    if [ "${2-}" = e2e ]; then programs+=("${e2e_programs[@]}"); fi
    "$@" ;;
  up) up ;;
  kubectl) enter_or_fail "$@" ;;
  sh) shift; if [ $# = 0 ]; then set -- bash; fi; enter_or_fail "$@" ;;
  down) down ;;
  *) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
