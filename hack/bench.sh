#!/bin/bash
# bench.sh [PODS [LIST_PODS]...]: measure Tripod with containers, Wasm components and machines and, in the same run on the same
# machine, containerd (with the same OCI runtime, CNI chain and client) and QEMU started by hand; write docs/benchmarks.md.
# Default: 30 pods, lists with 100 and 200.
#
# bench.sh containers [PODS [LIST_PODS]...]: only containers; prints the tables.
#
# bench.sh vm [BOOTS]: only machines, 10 boots by default; prints the table.
#
# bench.sh many [PODS]: only Tripod with many Linux pods of one sleeping process, 1000 by default; prints the table.
#
# bench.sh edge: only edge modules.
#
# bench.sh light: only the memory of an idle node of the edge; prints the table.
#
# bench.sh pods [PODS [c | js | go | python]]: only Tripod with many pods of a component, 1000 by default, or of the Greeter in a
# language; prints the line.
#
# bench.sh first: only the first start of a component, calls to Greeters in C, Go and JavaScript, HTTP/2 without a component, and
# what "serve" measures; prints the tables.
#
# bench.sh calls [IMAGE[,reuse]...]: only the calls to the Greeters, by default to all of them; prints the table.
#
# bench.sh serve: only components of wasi:http beside `wasmtime serve`, which hack/serve.sh builds (20 min, once); prints the
# table. "first" and the whole run leave it out if that is not built in the engine's version.
#
# Everything runs in its own namespaces (hack/testns.sh) and leaves nothing behind. Requires build/bin/tripod,
# build/bin/tripod-wasm and what `hack/setup.sh bench` installs; hack/containerd.sh builds today's containerd. Modules are
# compared with plain clients of the same broker.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export TRIPOD=$PWD/build/bin/tripod
report=docs/benchmarks.md
registry=127.0.0.1:5000
image=registry.k8s.io/e2e-test-images/busybox:1.29-2
component=registry.k8s.io/tripod/wasm/faults-c:1
first_component=tripod/wasm/greeter-go:1 # in the registry
greeters=(registry.k8s.io/tripod/wasm/greeter-{c,js}:1 "registry.k8s.io/$first_component"{,",reuse"})
machine=registry.k8s.io/tripod/vm/busybox:1
pause=registry.k8s.io/pause:3.9
# Where Tripod serves its metrics.
metrics=127.0.0.1:9464
# Accelerator (kvm, if it works) and number of boots of the machines.
accel=${TRIPOD_BENCH_ACCEL:-tcg} boots=10
# Number of component pods for the memory measurement, and for the scale test.
idle_pods=200 many_pods=1000

fail() { printf 'bench: %s\n' "$*" >&2; exit 1; }
say()  { printf 'bench: %s\n' "$*" >&2; }

# await WHAT COMMAND...: the command must succeed within 30 seconds.
await() {
  local what=$1 end=$((SECONDS + 30)); shift
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $end ] || { tail -n 20 "$dir"/*.log >&2; fail "$what: not within 30 s ($*)"; }
    read -rt 0.1 <> <(:) || true # a pause without a process
  done
}

connects() { (exec 3<>"/dev/tcp/$1/$2"); }

# ------------------------------------------------------------------------------------ inside the namespaces

# write_files: write what both runtimes share: the mirror configuration, and the CNI chain of CNI's documentation.
write_files() {
  build/bin/images hosts "$registry" "$dir/certs.d"
  mkdir -p "$dir/net.d"
  cat >"$dir/net.d/10-bench.conflist" <<JSON
{"cniVersion": "1.0.0", "name": "bench", "plugins": [
  {"type": "bridge", "bridge": "bench0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.99.0.0/16"}]], "routes": [{"dst": "0.0.0.0/0"}], "dataDir": "$dir/leases"}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
JSON
}

# oci_of_containerd NAME: the program of containerd's OCI runtime. It calls crun through hack/bench/crun.c, because containerd
# 2.4 writes specifications that Debian's crun refuses.
oci_of_containerd() { if [ "$1" = crun ]; then echo "$PWD/build/bin/crun"; else echo "$1"; fi; }

# start_tripod OCI-RUNTIME
start_tripod() {
  cat >"$dir/tripod.toml" <<TOML
root = "$dir/tripod-$1"
state = "/run/tripod"
[log]
level = "warn"
[image]
hosts_dirs = ["$dir/certs.d"]
[network]
conf_dir = "$dir/net.d"
bin_dirs = ["/usr/lib/cni"]
[linux]
runtime = "$1"
cgroup_parent = "$TRIPOD_TEST_CGROUP"
[vm]
accel = "$accel"
[metrics]
address = "$metrics"
[backends]
linux = ${others:-true}
vm = ${others:-true}
[edge]
enabled = ${edge:-false}
orchestrator = ${hosted:-false}
module_roots = ["$PWD/examples/edge"]
[orchestrator]
root = "$dir/orchestrator"
TOML
  "$TRIPOD" daemon --config "$dir/tripod.toml" 2>>"$dir/tripod.log" &
  runtime_pid=$! socket=/run/tripod/tripod.sock
}

# write_containerd NAME OCI-RUNTIME: write the part of containerd's configuration that both versions share.
write_containerd() {
  cat <<TOML
root = "$dir/containerd-$1"
state = "/run/containerd"
oom_score = 0
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.erofs",
  "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing", "io.containerd.nri.v1.nri"]
[grpc]
  address = "/run/containerd/containerd.sock"
TOML
}

# start_containerd OCI-RUNTIME: start the containerd that hack/containerd.sh built.
start_containerd() {
  write_containerd "$1" >"$dir/containerd-$1.toml"
  cat >>"$dir/containerd-$1.toml" <<TOML
[plugins."io.containerd.cri.v1.images"]
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "$pause"
  [plugins."io.containerd.cri.v1.images".registry]
    config_path = "$dir/certs.d"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      BinaryName = "$(oci_of_containerd "$1")"
  [plugins."io.containerd.cri.v1.runtime".cni]
    conf_dir = "$dir/net.d"
    bin_dirs = ["/usr/lib/cni"]
TOML
  sed -i '1i version = 3' "$dir/containerd-$1.toml"
  # containerd looks for its shim in PATH.
  PATH=$containerd:$PATH containerd --config "$dir/containerd-$1.toml" --log-level warn 2>>"$dir/containerd.log" &
  runtime_pid=$! socket=/run/containerd/containerd.sock
}

# start_old_containerd: start Debian's containerd, with runc.
start_old_containerd() {
  write_containerd old >"$dir/containerd-old.toml"
  cat >>"$dir/containerd-old.toml" <<TOML
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "$pause"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "$dir/certs.d"
  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = "$dir/net.d"
    bin_dir = "/usr/lib/cni"
TOML
  sed -i '1i version = 2' "$dir/containerd-old.toml"
  containerd --config "$dir/containerd-old.toml" --log-level warn 2>>"$dir/containerd.log" &
  runtime_pid=$! socket=/run/containerd/containerd.sock
}

stop_runtime() {
  settle
  kill "$runtime_pid"
  wait "$runtime_pid" || true
}

# settle: wait until a Tripod has released the networks of the pods that were stopped. It would do so beside what is measured next.
settle() { [ "$socket" != /run/tripod/tripod.sock ] || await "all networks are released" released; }

released() { [[ $(curl -fs "http://$metrics/metrics") == *$'\ntripod_network_releases_pending 0\n'* ]]; }

# measure NAME TITLE START...: run both benchmarks of one runtime, into $dir/NAME-{cri,host,lists-N}.json.
measure() {
  local name=$1 title=$2 common; shift 2
  "$@"
  await "$title answers" "$TRIPOD" info --endpoint "unix://$socket"
  common=(--socket "unix://$socket" --title "$title" --image "$image" --log-dir "$dir/logs" --cgroup-parent "$TRIPOD_TEST_CGROUP/bench")
  say "$title: $pods pods, 1 and 10 at a time"
  "$TRIPOD" bench cri "${common[@]}" --pods "$pods" --parallel 1,10 --json "$dir/$name-cri.json" >/dev/null
  settle
  say "$title: $pods pods without CNI"
  "$TRIPOD" bench cri "${common[@]}" --pods "$pods" --parallel 1 --host-network --json "$dir/$name-host.json" >/dev/null
  for n in "${list_pods[@]}"; do
    settle
    say "$title: lists with $n pods"
    "$TRIPOD" bench lists "${common[@]}" --pods "$n" --json "$dir/$name-lists-$n.json" >/dev/null
  done
  grep -E '^(VmRSS|RssAnon)' "/proc/$runtime_pid/status" | tr -s '\t ' ' ' | paste -sd ' ' >"$dir/$name-rss"
  stop_runtime
}

# measure_wasm: measure for component pods, and their memory and calls, into $dir/wasm-*.
measure_wasm() {
  local common all
  start_tripod crun
  await "Tripod answers" "$TRIPOD" info --endpoint "unix://$socket"
  common=(--socket "unix://$socket" --title "Tripod, wasm" --image "$component" --handler wasm --command '' --log-dir "$dir/logs"
    --cgroup-parent "$TRIPOD_TEST_CGROUP/bench")
  say "Tripod, wasm: $pods pods, 1 and 10 at a time"
  "$TRIPOD" bench cri "${common[@]}" --pods "$pods" --parallel 1,10 --json "$dir/wasm-cri.json" >/dev/null
  settle
  say "Tripod, wasm: $pods pods without CNI"
  "$TRIPOD" bench cri "${common[@]}" --pods "$pods" --parallel 1 --host-network --annotation 'vimana.host/port={port}' \
    --annotation vimana.host/cleartext-port=off --json "$dir/wasm-host.json" >/dev/null
  settle
  say "Tripod, wasm: memory of $idle_pods pods"
  "$TRIPOD" bench cri "${common[@]}" --pods "$idle_pods" --parallel 10 --json "$dir/wasm-idle.json" >/dev/null
  all=(--socket "unix://$socket" --image "$component" --log-dir "$dir/logs")
  settle
  say "Tripod, wasm: calls"
  build/bin/wasmbench "${all[@]}" calls >"$dir/wasm-calls.md"
  settle
  measure_first
  settle
  measure_pods
  stop_runtime
}

# measure_pods: start many pods of a component, and call each, into $dir/wasm-many.md.
measure_pods() {
  say "Tripod, wasm: $many_pods pods"
  build/bin/wasmbench --socket "unix://$socket" --image "$component" --log-dir "$dir/logs" many "$many_pods" >"$dir/wasm-many.md"
}

# push_greeter: push examples/wasm/greeter-go.
push_greeter() { "$TRIPOD" push build/bin/greeter-go.wasm "$registry/$first_component" --plain-http >/dev/null; }

# measure_first: start the first pod of a component that the node has never seen, into $dir/wasm-first.md.
measure_first() {
  push_greeter
  say "Tripod, wasm: first start of a component of $(stat -c %s build/bin/greeter-go.wasm) bytes"
  build/bin/wasmbench --socket "unix://$socket" --image "registry.k8s.io/$first_component" --log-dir "$dir/logs" first >"$dir/wasm-first.md"
  settle
  measure_peers "${greeters[@]}"
  settle
  measure_wire
  settle
  measure_serve
}

# measure_peers IMAGE[,reuse]...: call Greeters, into $dir/wasm-peers.md.
measure_peers() {
  say "Tripod, wasm: Greeters beside grpc-go"
  build/bin/wasmbench --socket "unix://$socket" --log-dir "$dir/logs" --seconds 1 peers build/bin/greeter-native "$@" >"$dir/wasm-peers.md"
}

# measure_serve: compare components of wasi:http with `wasmtime serve`, into $dir/wasm-serve.md.
measure_serve() {
  hack/serve.sh check || { echo 'Not measured: hack/serve.sh had not built it.' >"$dir/wasm-serve.md"; return; }
  local language components=(registry.k8s.io/tripod/wasm/hello-http-c:1=examples/wasm/hello-http-c/hello-http-c.wasm)
  for language in js py; do
    "$TRIPOD" push "build/serve/hello-$language.wasm" "$registry/tripod/wasm/hello-http-$language:1" --plain-http >/dev/null
    components+=("registry.k8s.io/tripod/wasm/hello-http-$language:1=build/serve/hello-$language.wasm")
  done
  say "Tripod, wasm: components of wasi:http beside wasmtime serve"
  build/bin/wasmbench --socket "unix://$socket" --log-dir "$dir/logs" --seconds 2 serve build/serve/bin/wasmtime "${components[@]}" >"$dir/wasm-serve.md"
}

# measure_wire: compare the server of HTTP/2 without a component, into $dir/wasm-wire.md.
measure_wire() {
  say "Tripod, wasm: HTTP/2 without a component beside grpc-go"
  {
    printf '| HTTP/2 without a component | Tripod | grpc-go | ratio |\n|---|---:|---:|---:|\n'
    go test -vet=off -run '^$' -bench '^Benchmark(HTTP2|H2load|IdleMemory)$' -benchtime 7x ./internal/sandbox/wasm/internal/dataplane |
      awk '/^Benchmark/ {
        name = $1; sub(/^Benchmark/, "", name); sub(/-[0-9]+$/, "", name)
        for (i = 3; i < NF; i += 2) value[$(i + 1)] = $i
        unit = "ours/s" in value ? "/s" : "-KiB"
        printf "| %s, %s | %.0f | %.0f | %.2f |\n", name, unit == "/s" ? "calls/s" : "KiB each", value["ours" unit], value["grpc-go" unit], value["ratio"]
        delete value
      }'
  } >"$dir/wasm-wire.md"
}

# measure_many: start as many containers as components, each one process that sleeps.
measure_many() {
  start_tripod crun
  await "Tripod answers" "$TRIPOD" info --endpoint "unix://$socket"
  say "Tripod, crun: $many_pods pods of one sleeping process"
  "$TRIPOD" bench lists --socket "unix://$socket" --title "Tripod, crun" --image "$image" --command sleep --command 1000000 --log-dir "$dir/logs" \
    --cgroup-parent "$TRIPOD_TEST_CGROUP/bench" --pods "$many_pods" --json "$dir/many.json" >"$dir/many.md"
  stop_runtime
}

# measure_vm: compare machines with QEMU started by hand, into $dir/vm.md.
measure_vm() {
  start_tripod crun
  await "Tripod answers" "$TRIPOD" info --endpoint "unix://$socket"
  say "Tripod, vm: $boots boots, and as many of QEMU by hand"
  build/bin/vmbench -socket "$socket" -image "$machine" -log-dir "$dir/logs" -daemon "$runtime_pid" -accel "$accel" -rounds "$boots" >"$dir/vm.md"
  stop_runtime
}

# measure_edge: compare modules with plain clients of the same broker, into $dir/edge.md.
measure_edge() {
  edge=true start_tripod crun
  await "Tripod answers" "$TRIPOD" info --endpoint "unix://$socket"
  "$TRIPOD" orchestrator --config "$dir/tripod.toml" 2>>"$dir/orchestrator.log" &
  orchestrator_pid=$!
  await "the runtime has registered" runtime_alive
  say "Tripod, edge: messages and modules"
  build/bin/edgebench -modules examples/edge >"$dir/edge.md"
  measure_broker
  kill "$orchestrator_pid"
  wait "$orchestrator_pid" || true
  stop_runtime
}

# measure_light: what an idle node of the edge takes, with only the Wasm backend, into $dir/light.md.
measure_light() {
  printf '| MiB (PSS), idle for 60 s | daemon with broker and manager | orchestrator | together |\n|---|---:|---:|---:|\n' >"$dir/light.md"
  say "Tripod, edge: memory of an idle node, the orchestrator in the daemon"
  edge=true hosted=true others=false start_tripod crun
  await "the runtime has registered" runtime_alive
  sleep 60
  light_row "in one process, after the start" "$runtime_pid"
  for i in {1..10}; do "$TRIPOD" edge run examples/edge/ticker-go/ticker.wasm --name "ticker-$i" --channel out=bench/tick:w >/dev/null; done
  for i in {1..10}; do "$TRIPOD" edge stop "ticker-$i" >/dev/null; done
  sleep 60
  light_row "in one process, after 10 modules" "$runtime_pid"
  stop_runtime
  say "Tripod, edge: memory of an idle node, the orchestrator beside the daemon"
  edge=true others=false start_tripod crun
  "$TRIPOD" orchestrator --config "$dir/tripod.toml" 2>>"$dir/orchestrator.log" &
  orchestrator_pid=$!
  await "the runtime has registered" runtime_alive
  sleep 60
  light_row "in two processes, after the start" "$runtime_pid" "$orchestrator_pid"
  kill "$orchestrator_pid"
  wait "$orchestrator_pid" || true
  stop_runtime
}

# light_row NAME PID...: add a row with the memory of the processes.
light_row() {
  local name=$1
  shift
  awk -v name="$name" -v one="$#" '/^Pss:/ { pss[++n] = $2 / 1024 }
    END { printf "| %s | %.1f | %s | %.1f |\n", name, pss[1], one == 1 ? "in it" : sprintf("%.1f", pss[2]), pss[1] + pss[2] }' \
    $(printf '/proc/%s/smaps_rollup ' "$@") >>"$dir/light.md"
}

# measure_broker: compare the embedded broker with mosquitto, into $dir/broker.md.
measure_broker() {
  say "Tripod, edge: the broker beside mosquitto"
  {
    printf '| broker | Tripod | mosquitto | ratio |\n|---|---:|---:|---:|\n'
    go test -vet=off -run '^$' -bench '^BenchmarkBroker$' -benchtime 200000x ./internal/edge/broker >"$dir/broker.txt"
    go test -vet=off -run '^$' -bench '^BenchmarkBroker(Memory|Start)$' -benchtime 3x ./internal/edge/broker >>"$dir/broker.txt"
    awk '/^Benchmark/ { name = $1; sub(/^Benchmark/, "", name); sub(/-[0-9]+$/, "", name) }
      / ratio/ {
        for (i = 1; i < NF; i++) if ($(i + 1) ~ /^(ours|mosquitto)-|^ratio$/) value[$(i + 1)] = $i
        unit = "ours-ms" in value ? "ms" : "ours-B" in value ? "B" : "msg/cpu-s"
        label = unit == "ms" ? "start with 100 000 retained messages, ms" : unit == "B" ? "memory, bytes each" : "messages per second of processor time"
        printf "| %s, %s | %.0f | %.0f | %.2f |\n", name, label, value["ours-" unit], value["mosquitto-" unit], value["ratio"]
        delete value
      }' "$dir/broker.txt"
  } >"$dir/broker.md"
}

runtime_alive() { "$TRIPOD" edge runtimes | grep -q alive; }

inside() {
  dir=$TRIPOD_TEST_DIR pods=$1 runtime_pid='' orchestrator_pid='' load=$(cut -d ' ' -f 1-3 /proc/loadavg)
  if grep -q favordynmods /proc/mounts; then favor='cgroups are mounted with favordynmods'; else favor='cgroups are mounted without favordynmods'; fi
  list_pods=("${@:2}")
  trap 'kill $orchestrator_pid $runtime_pid $registry_pid 2>/dev/null; wait' EXIT
  write_files
  build/bin/images serve "$registry" 2>"$dir/registry.log" &
  registry_pid=$!
  await "the registry" connects 127.0.0.1 5000
  if [ "$pods" = vm ]; then
    boots=${list_pods[0]:-$boots}
    measure_vm
    cat "$dir/vm.md"
    return
  fi
  if [ "$pods" = many ]; then
    many_pods=${list_pods[0]:-$many_pods}
    measure_many
    cat "$dir/many.md"
    return
  fi
  if [ "$pods" = edge ]; then
    measure_edge
    measure_light
    cat "$dir/edge.md" "$dir/broker.md" "$dir/light.md"
    return
  fi
  if [ "$pods" = light ]; then
    measure_light
    cat "$dir/light.md"
    return
  fi
  if [ "$pods" = first ]; then
    start_tripod crun
    await "Tripod answers" "$TRIPOD" info --endpoint "unix://$socket"
    measure_first
    stop_runtime
    cat "$dir"/wasm-{first,peers,wire,serve}.md
    return
  fi
  if [ "$pods" = pods ]; then
    many_pods=${list_pods[0]:-$many_pods}
    start_tripod crun
    await "Tripod answers" "$TRIPOD" info --endpoint "unix://$socket"
    if [ -n "${list_pods[1]-}" ]; then
      component=registry.k8s.io/tripod/wasm/greeter-${list_pods[1]}:1
      case ${list_pods[1]} in
        go) push_greeter ;;
        python) "$TRIPOD" push examples/wasm/greeter-python "$registry/tripod/wasm/greeter-python:1" --plain-http >/dev/null ;;
      esac
    fi
    measure_pods
    stop_runtime
    cat "$dir/wasm-many.md"
    return
  fi
  if [ "$pods" = calls ]; then
    [ ${#list_pods[@]} -gt 0 ] || list_pods=("${greeters[@]}")
    start_tripod crun
    await "Tripod answers" "$TRIPOD" info --endpoint "unix://$socket"
    push_greeter
    measure_peers "${list_pods[@]}"
    stop_runtime
    cat "$dir/wasm-peers.md"
    return
  fi
  if [ "$pods" = serve ]; then
    start_tripod crun
    await "Tripod answers" "$TRIPOD" info --endpoint "unix://$socket"
    measure_serve
    stop_runtime
    cat "$dir/wasm-serve.md"
    return
  fi
  if [ "$pods" = containers ]; then
    pods=${list_pods[0]:-30} list_pods=("${list_pods[@]:1}")
    measure_containers
    report_containers
    return
  fi
  measure_wasm
  measure_edge
  measure_light
  measure_vm
  measure_many # before a daemon with runc: its state would not be of the record of the daemon with crun
  measure_containers
  write_report
}

# The two sides of a pair run one after the other, so that a neighbour of the machine disturbs both.
measure_containers() {
  measure crun "Tripod, crun" start_tripod crun
  measure containerd-crun "containerd $new_version, crun" start_containerd crun
  measure runc "Tripod, runc" start_tripod runc
  measure containerd-runc "containerd $new_version, runc" start_containerd runc
  measure containerd-old "containerd $old_version, runc" start_old_containerd
}

# compare NAME FIGURES...: print tables of several runtimes.
compare_crun() { "$TRIPOD" bench compare "$dir/crun-$1.json" "$dir/containerd-crun-$1.json"; }
compare_runc() { "$TRIPOD" bench compare "$dir/runc-$1.json" "$dir/containerd-old-$1.json" "$dir/containerd-runc-$1.json"; }

# A component has no OCI runtime, so it is compared with the pair of the faster one.
compare_wasm() { "$TRIPOD" bench compare "$dir/wasm-$1.json" "$dir/crun-$1.json" "$dir/containerd-crun-$1.json"; }

report_containers() {
  local name n
  for name in crun runc; do
    printf '\n## Containers, %s on both sides\n' "$name"
    "compare_$name" cri
    "compare_$name" host
    for n in "${list_pods[@]}"; do "compare_$name" "lists-$n"; done
  done
  cat <<MD

Daemons' memory after all that (VmRSS, of which RssAnon): Tripod with crun $(cat "$dir/crun-rss"), with runc $(cat "$dir/runc-rss"); containerd
$new_version with crun $(cat "$dir/containerd-crun-rss"), with runc $(cat "$dir/containerd-runc-rss"); containerd $old_version $(cat "$dir/containerd-old-rss").
MD
}

write_report() {
  cat <<MD
# Benchmarks

Compare columns, not runs: all columns of a table are from one run on one machine, which others share. \`make bench\`
(hack/bench.sh) wrote this page.

One client, \`tripod bench\`, drives every runtime over its CRI socket. All runtimes get the same image (busybox, a shell that
ends at SIGTERM), the same CNI chain (bridge with ipMasq, host-local, portmap) and the same plugins. Tripod runs these
plugins in process where it can. Times are p50 / p95 in milliseconds. The last column is the last runtime's p50 divided
by the first's.

- Date: $(date -u +%Y-%m-%d)
- Machine: $(nproc) × $(awk -F ': ' '/^model name/ {print $2; exit}' /proc/cpuinfo), $(awk '/^MemTotal/ {printf "%.0f GiB", $2 / 1048576}' /proc/meminfo), Linux $(uname -r | cut -d . -f 1,2)
- Load average (1, 5, 15 minutes): $load at the start, $(cut -d ' ' -f 1-3 /proc/loadavg) at the end, with the benchmark's own; $favor
- $("$TRIPOD" version)
- $(crun --version | head -1); $(runc --version | head -1); $(conmon --version | head -1)
- containerd $new_version from the Go module proxy (hack/containerd.sh), containerd $old_version from Debian; CNI plugins $(dpkg-query -W -f '${Version}' containernetworking-plugins)

The up phase of a pod is RunPodSandbox, CreateContainer and StartContainer. The down phase is StopContainer,
RemoveContainer, StopPodSandbox and RemovePodSandbox. Helpers are the processes that a pod adds beside the container's
own: conmon for Tripod, shim and pause for containerd. Their memory is given as PSS.

A list that is called undecoded is timed until its answer is complete at the client, which does not decode it. Decoding 1000
containers takes the client longer than the call, whichever runtime it asks.

containerd $new_version writes specifications that this crun refuses. It calls crun through a small program that lowers the version
in the specification, which takes 0.3 ms for each call.

$(report_containers)

$(cat "$dir/many.md")

## Components

The pods run examples/wasm/faults-c. Its image is present and its compiled code is cached; one worker serves the node. The
other columns are the pods of containers from above.
$(compare_wasm cri)
$(compare_wasm host)
$("$TRIPOD" bench compare "$dir/wasm-idle.json")

$(cat "$dir/wasm-many.md")

### Calls

One client calls two servers: the component in the worker, with a fresh instance for each request, and a bare quic-go
http3.Server whose handler copies the body. The bare server is a process of its own in the same network namespace.

$(cat "$dir/wasm-calls.md")

### Greeters beside grpc-go

Greeters (examples/wasm/greeter-c, greeter-js and greeter-go) answer SayHello, beside greeter-go built for this machine with grpc-go, a process in the same
network namespace. Neither side has a limit of processor time. Each request has a fresh instance, but for the rows with reuse. Context switches and idle time
are those of the whole machine, with the client, which takes a third of it.

$(cat "$dir/wasm-peers.md")

Where the worker's processor time goes in such calls, of 1 and 32 connections, in per cent: the innermost frames of \`perf record -a -g\` on 2026-11-28, on two
cores with Linux 6.18. “Threads” is how goroutines, and threads in guests, hand over to each other.

The targets are 0.8 of grpc-go's rate at 32 connections in C, 0.3 in Go and 0.5 in Go with reuse; the shares say what is missing. In C, network and framing are as
for grpc-go, and the rest is the price of a guest for each request. In Go the guest itself is the largest part that could shrink: code for WebAssembly takes two to
three times as long as native code, in caches that it shares with the server, and Go's runtime moves goroutines from a thread that is in a guest for more than 20 µs.

| | greeter-c | greeter-go |
|---|---:|---:|
| kernel: network | 33 | 20 |
| kernel: threads, the rest | 12 | 14 |
| kernel: memory (changed pages of instances) | 4 | 7 |
| HTTP/2 and gRPC framing | 17 | 8 |
| conversion, limits, deadlines | 7 | 4 |
| instances and calls, in Go | 5 | 5 |
| engine (instances, function references, restored pages) | 9 | 15 |
| guest | 2 | 19 |
| Go: scheduler, collector, the rest | 11 | 8 |

The next table is the data plane alone, on loopback in one process with the server of grpc-go. The client is grpc-go with one call at a time on each connection,
h2load with one or ten, or one that only writes frames.

$(cat "$dir/wasm-wire.md")

### Beside wasmtime serve

The command \`serve\` of wasmtime's CLI, in the version of the engine, serves the same component in the pod's network namespace. Neither side has a limit
of processor time, and each request has a fresh instance. The client is wrk with one thread. The components answer with a line of text: C
(examples/wasm/hello-http-c), JavaScript with componentize-js and Python with componentize-py (hack/serve).
The slowest hundredth in C takes longer than with \`wasmtime serve\`, which answers less than half as many requests: a server of Go's net/http that computes as
long for each, at the same rate, has a p99 of 13 ms here, because two processors are shared with the client in slices of some milliseconds.

$(cat "$dir/wasm-serve.md")

### First start

The node pulls examples/wasm/greeter-go, a gRPC server in Go, and starts its first pod at once, which begins with quick code.
Further pods start when there is optimised code.

$(cat "$dir/wasm-first.md")

## Modules by MQTT

The modules are those of examples/edge on the runtime tripod/wasm. The broker is the embedded one in the daemon, and an
orchestrator runs beside it. Both sides of the comparison use the same client, internal/edge/mqtt in a process of its own.

$(cat "$dir/edge.md")

The broker alone, beside mosquitto, with raw clients, and a topic for each pair of publisher and subscriber. Memory is the growth of
the process's resident set with 4 000 clients that are idle, or away, once it has not changed for more than a second:

$(cat "$dir/broker.md")

A node with only the Wasm backend, the embedded broker and an orchestrator, which nobody uses:

$(cat "$dir/light.md")

## Machines

The test guest (hack/images/guest: a kernel, an initramfs, a shell script) boots in a VM pod and, in turns, in QEMU started
by hand with the same kernel, initramfs, memory, accelerator and cloud-init data. It is ready when it prints its own line on
its console. The pod's guest also finds the agent and starts it; the other one has none.

$(cat "$dir/vm.md")
MD
}

# ------------------------------------------------------------------------------------ start here

if [ "${1-}" = __inside ]; then
  inside "${@:2}"
  exit
fi
for program in "$TRIPOD" "$TRIPOD-wasm"; do
  [ -x "$program" ] || fail "$program is missing: run make build first"
done
# alone WHAT...: only one of these parts is measured.
alone() { [[ " $* " == *" ${part:-all} "* ]]; }
part=${1-}
alone vm edge light many pods first calls serve || command -v containerd >/dev/null || fail "containerd is not installed: run hack/setup.sh bench"
mkdir -p build
exec 9>build/.bench.lock
flock -n 9 || fail "another benchmark is running; two would disturb each other"
hack/images.sh build
! alone serve || hack/serve.sh
[ "${1-} ${3-}" != "pods python" ] || "$TRIPOD" component test examples/wasm/greeter-python >/dev/null # installs the tool, from PyPI
if ! alone vm edge light; then
  crun=$(command -v crun) || fail "crun is not installed: run hack/setup.sh"
  cc -O2 -static -D CRUN="\"$crun\"" -o build/bin/crun hack/bench/crun.c
fi
if ! alone vm edge light many pods first calls serve; then
  containerd=$(hack/containerd.sh)
  export containerd old_version new_version=${containerd##*/}
  old_version=$(containerd --version | awk '{print $3}') old_version=${old_version%%[~+]*}
fi
GOOS=wasip1 GOARCH=wasm go build -C examples/wasm/greeter-go -buildmode=c-shared -o "$PWD/build/bin/greeter-go.wasm" .
CGO_ENABLED=0 go build -C examples/wasm/greeter-go -o "$PWD/build/bin/greeter-native" .
CGO_ENABLED=0 go build -o build/bin/ ./hack/wasmbench ./internal/sandbox/vm/internal/test/vmbench ./hack/edgebench
if alone vm edge light many pods first calls serve containers; then
  exec hack/testns.sh "$PWD/hack/bench.sh" __inside "$@"
fi
new=$(mktemp)
trap 'rm -f "$new"' EXIT
[ $# -gt 1 ] || set -- "${1:-30}" 100 200
hack/testns.sh "$PWD/hack/bench.sh" __inside "$@" >"$new"
{ echo; sed -n '/^## From RunPodSandbox to the first line/,$p' "$report"; } >>"$new" # kept by hand
install -m 644 "$new" "$report"
say "wrote $report"
