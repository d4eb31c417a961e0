#!/bin/bash
# kube.sh build [SET]       build the programs of Kubernetes into a cache outside the tree, unless they exist
# kube.sh check [SET]       print the cache's directory, or what is missing
# kube.sh up                start a cluster in the background, with a registry of test images and NODES (1) nodes
# kube.sh kubectl ARG...    run kubectl as that cluster's administrator
# kube.sh sh [COMMAND]      run a shell or a command on that cluster's first node; kubectl and tripod are in PATH
# kube.sh node N COMMAND... run a command on that cluster's Nth node
# kube.sh down              stop it and clean up
#
# A SET has more programs: e2e those of Kubernetes' end-to-end tests, cluster those of a cluster with several nodes
# (flannel and CoreDNS), metrics metrics-server. The last two are in directories of their own, which check prints instead.
# The SET kubeadm is only kubeadm.
#
# The cache is TRIPOD_KUBE_CACHE (/var/cache/tripod/kube), with a directory per version. The cluster runs in its own namespaces
# (hack/testns.sh) and leaves nothing behind.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

programs=(kubelet kubectl kube-apiserver kube-controller-manager kube-scheduler kube-proxy)
e2e_programs=(e2e.test ginkgo agnhost)
# pinned MODULE DIR: print the version of a module that DIR/go.mod requires.
pinned() { awk -v m="$1" '$1 == m || $2 == m {print $NF; exit}' "hack/$2/go.mod"; }
version=$(pinned k8s.io/kubernetes kube)
cache=${TRIPOD_KUBE_CACHE:-/var/cache/tripod/kube}/$version
network=flannel-$(pinned github.com/flannel-io/flannel kube/network)-coredns-$(pinned github.com/coredns/coredns kube/network)
cluster_programs=("$network/flanneld" "$network/coredns")
metrics=metrics-server-$(pinned sigs.k8s.io/metrics-server kube/metrics)
metrics_programs=("$metrics/metrics-server")
pidfile=build/kube.pid
log=build/kube.log

say()  { printf 'kube: %s\n' "$*"; }
fail() { say "$*" >&2; exit 1; }

# ---------------------------------------------------------------------------------------------- the programs

# missing prints the programs that the cache lacks.
missing() {
  local p
  for p in "${programs[@]}"; do [ -x "$cache/$p" ] || echo "$p"; done
}

# ldflags set the version, which Kubernetes' own build takes from git.
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
  local command=(go build) module=kube package=k8s.io/kubernetes/cmd/$1 cgo=0
  case $1 in
    # One of flannel's backends that host-gw does not need is in C.
    */flanneld) module=kube/network package=github.com/flannel-io/flannel cgo=1 ;;
    */coredns) module=kube/network package=./coredns ;;
    */metrics-server) module=kube/metrics package=sigs.k8s.io/metrics-server/cmd/metrics-server ;;
    e2e.test) command=(go test -c -vet off) package=k8s.io/kubernetes/test/e2e ;;
    ginkgo) package=github.com/onsi/ginkgo/v2/ginkgo ;;
    agnhost) package=k8s.io/kubernetes/test/images/agnhost ;;
  esac
  (cd "hack/$module" && CGO_ENABLED=$cgo nice "${command[@]}" -trimpath -ldflags "$(ldflags)" -o "$2" "$package")
}

build() {
  local want p began
  mapfile -t want < <(missing)
  [ ${#want[@]} -gt 0 ] || return 0
  say "building ${want[*]} $version from the Go module proxy into $cache (once, about 15 minutes on two cores for all)"
  for p in "${want[@]}"; do
    began=$SECONDS
    # Build under another name first, so that an interrupted build leaves no seemingly complete program.
    mkdir -p "$(dirname "$cache/$p")"
    compile "$p" "$cache/$p.new"
    mv "$cache/$p.new" "$cache/$p"
    say "$p is built, $((SECONDS - began)) s"
  done
}

check() {
  local want
  mapfile -t want < <(missing)
  [ ${#want[@]} = 0 ] || fail "$cache lacks ${want[*]}: run hack/kube.sh build${1:+ $1} (once, about 15 minutes)"
  command -v etcd >/dev/null || fail "etcd is missing: run hack/setup.sh kubelet"
  case ${1-} in
    cluster) echo "$cache/$network" ;;
    metrics) echo "$cache/$metrics" ;;
    *) echo "$cache" ;;
  esac
}

# ---------------------------------------------------------------------------------------------- a cluster that stays

running() { [ -s $pidfile ] && kill -0 "$(cat $pidfile)" 2>/dev/null; }

# first prints the first process in the cluster's namespaces, the child of testns.
first() {
  local init
  running && init=$(pgrep -P "$(cat $pidfile)") && [ -n "$init" ] && echo "$init"
}

up() {
  local nodes=${NODES:-1}
  ! running || fail "the cluster is already up (process $(cat $pidfile)); stop it with: $0 down"
  check >/dev/null
  if [ "$nodes" -gt 1 ]; then "$0" build cluster; fi
  hack/images.sh build
  CGO_ENABLED=0 go build -o build/bin/kubenode ./hack/kubenode
  say "starting the cluster (about 30 s on an idle machine)"
  setsid hack/testns.sh "$PWD/build/bin/kubenode" "$nodes" >$log 2>&1 </dev/null &
  echo $! >$pidfile
  until is_up; do
    running || fail "the cluster did not come up: $(cat $log)"
    sleep 0.2
  done
  cat <<TEXT
A cluster is up in namespaces of its own, with RuntimeClasses linux, wasm and vm. Number of nodes: $nodes. Try:

  hack/kube.sh kubectl get nodes -o wide
  hack/kube.sh kubectl create deployment web --image registry.k8s.io/e2e-test-images/nginx:1.14-2
  hack/kube.sh sh           # a shell with kubectl and tripod; every image in build/images/images.txt can be pulled
  make kubelet-down         # stop it and clean up
TEXT
}

is_up() { enter sh -c 'test -e "$KUBECONFIG"' 2>/dev/null; }

# dir prints the directory of the background cluster.
dir() {
  local pid
  pid=$(first) && tr '\0' '\n' <"/proc/$pid/environ" | sed -n 's/^TRIPOD_TEST_DIR=//p'
}

# enter COMMAND...: run a command in the namespaces of the background cluster, which are those of its first node.
enter() {
  local pid dir
  pid=$(first) && dir=$(dir) || return 1
  nsenter -t "$pid" -m -n -p -i -u -- env PATH="$PWD/build/bin:$cache:$PATH" TRIPOD_TEST_DIR="$dir" KUBECONFIG="$dir/kubeconfig" "$@"
}

enter_or_fail() {
  running || fail "no cluster is up; start it with: make kubelet-up"
  enter "$@"
}

# node N COMMAND...: run a command in the namespaces of the Nth node.
node() {
  local pid=1
  if [ "$1" != 1 ]; then pid=$(cat "$(dir)/cluster/node$1/pid"); fi
  shift
  enter_or_fail nsenter -t "$pid" -m -n -p -i -u -- "$@"
}

down() {
  running || { say "no cluster is up"; return; }
  local pid; pid=$(cat $pidfile)
  kill "$pid"
  while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
  rm -f $pidfile
  say "the cluster and its pods have ended"
}

# ---------------------------------------------------------------------------------------------- start here

case ${1-} in
  build | check)
    case ${2-} in
      e2e) programs+=("${e2e_programs[@]}") ;;
      cluster) programs+=("${cluster_programs[@]}") ;;
      metrics) programs+=("${metrics_programs[@]}") ;;
      kubeadm) programs=(kubeadm) ;;
    esac
    "$@" ;;
  up) up ;;
  kubectl) enter_or_fail "$@" ;;
  sh) shift; if [ $# = 0 ]; then set -- bash; fi; enter_or_fail "$@" ;;
  node) shift; [ $# -gt 1 ] || fail "usage: kube.sh node N COMMAND..."; node "$@" ;;
  down) down ;;
  *) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
