#!/bin/bash
# run.sh                demonstrate a node: pods, components, a virtual machine, edge modules, HTTP, gRPC, logs, exec, and how all of
#                       them survive kill -9 of the daemon
# run.sh up             start a node in the background, with a registry and test images
# run.sh sh [COMMAND]   run a shell or a command in that node's namespaces
# run.sh down           stop it and clean up
#
# Everything runs in its own namespaces (hack/testns.sh) and leaves nothing behind. Each step of the demonstration is checked;
# the exit code is 0 only if all succeed. Requires build/bin/tripod, which `make run` builds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export TRIPOD=$PWD/build/bin/tripod
registry=127.0.0.1:5000
images=registry.k8s.io/e2e-test-images # any name works: the mirror configuration sends every pull to our registry
nginx=$images/nginx:1.14-2
busybox=$images/busybox:1.29-2
greeter=images.test/tripod/wasm/greeter-c:1 # examples/wasm/greeter-c
disk=images.test/tripod/vm/disk:1           # hack/images/guest on a disk that boots: a containerDisk
pidfile=build/up.pid

# ---------------------------------------------------------------------------------------------- inside the namespaces

dir=${TRIPOD_TEST_DIR:-}
state=/run/tripod
daemon_pid='' registry_pid='' orchestrator_pid=''

write_config() {
  mount -t tmpfs logs /var/log # for the pods' logs; keeps the host's directory unchanged
  build/bin/images hosts "$registry" "$dir/certs.d"
  cat >"$dir/config.toml" <<TOML
root = "$dir/root"
state = "$state"

[image]
hosts_dirs = ["$dir/certs.d"]

[network]
conf_dir = "$dir/net.d"

[linux]
cgroup_parent = "$TRIPOD_TEST_CGROUP"

[vm] # the machine is small, and emulated, so that the demonstration is the same everywhere
accel = "tcg"
default_memory = $((128 << 20))
$([ ! -e build/guest/version ] || echo "guest_dir = '$PWD/build/guest'")

[edge]
enabled = true
keepalive_interval = "2s"
module_roots = ["$PWD/examples/edge"]

[orchestrator]
root = "$dir/orchestrator"
TOML
}

start_registry() {
  build/bin/images serve "$registry" 2>"$dir/registry.log" &
  registry_pid=$!
  await "the registry answers" connects 127.0.0.1 5000
}

start_orchestrator() {
  "$TRIPOD" orchestrator --config "$dir/config.toml" 2>>"$dir/orchestrator.log" &
  orchestrator_pid=$!
  await "the orchestrator knows the node's runtime" runtime_alive
}

runtime_alive() {
  kill -0 "$orchestrator_pid" 2>/dev/null || fail "the orchestrator has ended: $(tail -n 3 "$dir/orchestrator.log")"
  "$TRIPOD" edge runtimes -o json 2>/dev/null | jq -e 'any(.[]; .name == "wasm" and .status == "A")' >/dev/null
}

start_daemon() {
  "$TRIPOD" daemon --config "$dir/config.toml" 2>>"$dir/daemon.log" &
  daemon_pid=$!
  await "the daemon answers" daemon_ready
}

daemon_ready() {
  kill -0 "$daemon_pid" 2>/dev/null || fail "the daemon has ended: $(tail -n 3 "$dir/daemon.log")"
  "$TRIPOD" info >/dev/null 2>&1
}

end_all() {
  for pid in $orchestrator_pid $daemon_pid $registry_pid; do
    kill "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
  done
  end_carriers
}

# ---------------------------------------------------------------------------------------------- small helpers

say()  { printf '\n\033[1m%s\033[0m\n' "$*"; }
ok()   { printf '  ✔ %s\n' "$*"; }
fail() { printf '  ✘ %s\n' "$*" >&2; exit 1; }
show() { sed 's/^/    /'; }

# check WHAT COMMAND...: the command must succeed.
check() { local what=$1; shift; if "$@"; then ok "$what"; else fail "$what: failed ($*)"; fi; }

# await WHAT COMMAND...: the command must succeed within ten seconds, or $patience.
await() {
  local what=$1 end=$((SECONDS + ${patience:-10})); shift
  until "$@"; do
    [ $SECONDS -lt $end ] || fail "$what: not within ${patience:-10} s ($*)"
    read -rt 0.05 <> <(:) || true # a pause without a process
  done
}

connects() { (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; }

# http HOST PORT: print the response to GET /.
http() {
  local request='GET / HTTP/1.0\r\nHost: demo\r\n\r\n'
  { exec 3<>"/dev/tcp/$1/$2" && printf "$request" >&3 && cat <&3; } 2>/dev/null
}

welcomes() {
  local answer; answer=$(http "$1" "$2") || true
  [[ "$answer" == *"200 OK"*"Welcome to nginx!"* ]] || { printf "%s\n" "${answer:-no answer}" | show >&2; return 1; }
}
same()     { [ "$1" = "$2" ]; }
differ()   { [ "$1" != "$2" ]; }
matches()  { [[ "$1" == $2 ]]; }
pod_ip()   { "$TRIPOD" inspectp "$1" | jq -r .status.network.ip; }

# ---------------------------------------------------------------------------------------------- the demonstration

demo_check() {
  say "Can this host run pods?  (tripod check)"
  "$TRIPOD" check --config "$dir/config.toml" >"$dir/check.txt" || { show <"$dir/check.txt"; fail "this host cannot run pods"; }
  grep -v '^ok' "$dir/check.txt" | grep -v '^$' | show
}

demo_pull() {
  say "An image from the registry  (tripod pull)"
  "$TRIPOD" pull "$nginx" >/dev/null
  "$TRIPOD" pull "$busybox" >/dev/null
  "$TRIPOD" images | show
  check "two images are there" same "$("$TRIPOD" images -q | wc -l)" 2
}

demo_web() {
  say "A pod with nginx and a host port  (tripod run -p 8080:80)"
  "$TRIPOD" run --name web -p 8080:80 "$nginx" >/dev/null
  web_ip=$(pod_ip web)
  await "nginx listens" connects "$web_ip" 80
  check "it answers HTTP on the pod's address, $web_ip:80" welcomes "$web_ip" 80
  check "and through the host port, 127.0.0.1:8080" welcomes 127.0.0.1 8080
}

pair_files() {
  cat >"$dir/pod.yaml" <<YAML
metadata: {name: pair, namespace: demo, uid: pair}
hostname: pair
log_directory: /var/log/pods/pair
YAML
  cat >"$dir/server.yaml" <<YAML
metadata: {name: server}
image: {image: $nginx}
log_path: server.log
YAML
  # The client asks the server in its own pod, over localhost, and counts: a gap would show in its log.
  cat >"$dir/client.yaml" <<YAML
metadata: {name: client}
image: {image: $busybox}
command: [sh, -c, 'n=0; until wget -qO /dev/null http://127.0.0.1/; do sleep 0.1; done; while :; do n=\$((n+1)); wget -qO /dev/null http://127.0.0.1/ && echo "\$GREETING \$n"; sleep 0.1; done']
envs: [{key: GREETING, value: answer}]
log_path: client.log
YAML
}

# answers: count the answers in the client's log.
answers() { "$TRIPOD" logs client | wc -l; }
more_answers() { [ "$(answers)" -gt "$1" ]; }

demo_pair() {
  say "A pod of two containers, a server and its client  (tripod runp, create, start)"
  pair_files
  "$TRIPOD" runp "$dir/pod.yaml" >/dev/null
  for c in server client; do
    "$TRIPOD" create pair "$dir/$c.yaml" "$dir/pod.yaml" >/dev/null
    "$TRIPOD" start "$c" >/dev/null
  done
  "$TRIPOD" ps | show
  await "the client is answered" more_answers 2
  "$TRIPOD" logs -t --tail 2 client | show
  ok "the client logs the server's answers  (tripod logs)"
}

demo_streams() {
  say "Exec and port-forward  (tripod exec, port-forward)"
  check "exec sees the pod from inside" same "$("$TRIPOD" exec client hostname)" pair
  local code=0
  echo "from outside" | "$TRIPOD" exec -i client sh -c 'read line; [ "$line" = "from outside" ] && exit 42' || code=$?
  check "exec passes stdin on and returns the exit code" same $code 42
  "$TRIPOD" port-forward web 18080:80 >"$dir/forward.log" 2>&1 &
  local forward=$!
  await "port-forward listens" connects 127.0.0.1 18080
  check "port-forward carries HTTP to the pod" welcomes 127.0.0.1 18080
  kill -INT $forward && wait $forward || fail "port-forward failed: $(cat "$dir/forward.log")"
}

demo_kill() {
  say "kill -9 of the daemon"
  local before pods count
  before=$("$TRIPOD" ps -q | sort) pods=$("$TRIPOD" pods -q | sort) count=$(answers)
  kill -9 "$daemon_pid"
  wait "$daemon_pid" 2>/dev/null || true
  check "without a daemon the pod still answers" welcomes "$web_ip" 80
  check "and so does its host port" welcomes 127.0.0.1 8080
  start_daemon
  check "after the restart the pods are the same" same "$("$TRIPOD" pods -q | sort)" "$pods"
  check "and their containers still run" same "$("$TRIPOD" ps -q | sort)" "$before"
  await "the client goes on" more_answers "$count"
  check "and the log has no gap" gapless
  check "exec works again" same "$("$TRIPOD" exec client hostname)" pair
  "$TRIPOD" pods | show
}

# gapless: the client's log has the answers 1, 2, … without a gap.
gapless() { "$TRIPOD" logs client | awk '$0 != "answer " NR { exit 1 }'; }

# greets NAME COMMAND...: the command calls SayHello, and the replica NAME answers.
greets() {
  local name=$1 answer; shift
  answer=$("$TRIPOD" call "$@" greet.v1.Greeter/SayHello '{"name": "Ada"}' | tr -d ' ') || return
  matches "$answer" '*"Hello,Ada!"*'"\"$name\""'*' || { printf '%s\n' "$answer" | show >&2; return 1; }
}

# counted FILE N: the file has all answers of a Countdown from N in order.
counted() { jq -se --argjson n "$2" 'map(.number) == [range($n; -1; -1)]' "$1" >/dev/null; }
has_lines() { [ -f "$1" ] && [ "$(wc -l <"$1")" -ge "$2" ]; }

demo_components() {
  say "A WebAssembly component from the registry, three times  (tripod run -r wasm)"
  "$TRIPOD" pull "$greeter" >/dev/null
  local i ip
  for i in 1 2 3; do
    "$TRIPOD" run -r wasm --name "greeter-$i" -e "POD_NAME=greeter-$i" "$greeter" >/dev/null
  done
  "$TRIPOD" pods | grep -E 'STATE|greeter' | show
  for i in 1 2 3; do
    ip=$(pod_ip "greeter-$i")
    check "greeter-$i answers gRPC over HTTP/3 on its own address, $ip:443" greets "greeter-$i" --http3 --insecure "$ip:443"
    check "and over HTTP/2 in clear text, $ip:80" greets "greeter-$i" "$ip:80"
  done
  demo_component_log "$ip"
  demo_component_streams "$ip"
  demo_component_latency "$ip"
}

demo_component_log() {
  "$TRIPOD" attach greeter-3 >"$dir/attached.log" &
  local attached=$!
  await "what the component prints is seen by tripod attach" attached_shows "$1"
  ok "attach shows what the component prints  (tripod attach)"
  tail -n 2 "$dir/attached.log" | show
  kill -INT $attached && wait $attached || true
}

attached_shows() { greets greeter-3 "$1:80" && [ -s "$dir/attached.log" ]; }

# Streams over both transports continue while the daemon is killed and restarted.
demo_component_streams() {
  local ip=$1 n=60 h3 h2
  "$TRIPOD" call --http3 --insecure "$ip:443" greet.v1.Greeter/Countdown "{\"from\": $n, \"interval_ms\": 50}" >"$dir/h3.json" &
  h3=$!
  "$TRIPOD" call "$ip:80" greet.v1.Greeter/Countdown "{\"from\": $n, \"interval_ms\": 50}" >"$dir/h2.json" &
  h2=$!
  await "a stream over HTTP/3 and one over HTTP/2 have begun" has_lines "$dir/h3.json" 3
  ok "a stream over HTTP/3 and one over HTTP/2 are under way: kill -9 of the daemon"
  kill -9 "$daemon_pid"
  wait "$daemon_pid" 2>/dev/null || true
  check "without a daemon the component answers new calls" greets greeter-3 --http3 --insecure "$ip:443"
  start_daemon
  check "the stream over HTTP/3 ended without an error" wait $h3
  check "and so did the one over HTTP/2" wait $h2
  check "no number is missing in either" eval 'counted "$dir/h3.json" 60 && counted "$dir/h2.json" 60'
}

demo_component_latency() {
  ok "500 calls, one after the other  (tripod call --repeat)"
  latency "over HTTP/3" --http3 --insecure "$1:443" | show
  latency "over HTTP/2" "$1:80" | show
}

latency() {
  local what=$1; shift
  "$TRIPOD" call --repeat 500 "$@" greet.v1.Greeter/SayHello '{"name": "Ada"}' 2>&1 >/dev/null | sed "s|^|$what: |"
}

demo_machine() {
  local began=$SECONDS ip code=0
  say "A virtual machine from the registry, a disk that boots  (tripod run -r vm)"
  "$TRIPOD" pull "$disk" >/dev/null
  "$TRIPOD" run -r vm --name machine -d -i "$disk" >/dev/null
  ip=$(pod_ip machine)
  patience=90 await "the guest reports on its console that it is up" logs_have machine TRIPOD-GUEST-READY
  "$TRIPOD" logs machine | tr -d '\r' | grep -aE 'SYSLINUX|READY' | show
  ok "its console is the container's log  (tripod logs)"
  check "it serves its page on the pod's address, $ip:80" serves "$ip" "hello from machine"
  patience=30 await "its agent answers" runs machine true
  check "its agent runs a command  (tripod exec)" same "$("$TRIPOD" exec machine hostname)" machine
  "$TRIPOD" exec machine sh -c 'uname -sr; ip -o -4 addr show eth0' | show
  "$TRIPOD" exec machine sh -c 'exit 42' || code=$?
  check "and returns the exit code" same $code 42
  kill -9 "$daemon_pid"
  wait "$daemon_pid" 2>/dev/null || true
  check "without a daemon the machine still answers" serves "$ip" "hello from machine"
  start_daemon
  check "after the restart it is the same machine, running" matches "$("$TRIPOD" ps | grep machine)" '*Running*'
  mkfifo "$dir/keys"
  timeout 20 "$TRIPOD" console machine <"$dir/keys" >"$dir/console.log" 2>&1 &
  local console=$! keys
  exec {keys}>"$dir/keys" # the console session ends with its input
  echo 'echo typed $((40 + 2))' >&"$keys"
  await "what is typed on the console runs in the guest  (tripod console)" has_text "$dir/console.log" 'typed 42'
  ok "input on its console reaches its shell  (tripod console)"
  exec {keys}>&-
  check "the console session ends with its input" wait $console
  "$TRIPOD" stop --grace 30 machine >/dev/null
  check "stop presses its power button, and it turns itself off: exit code 0" same \
    "$("$TRIPOD" inspect machine | jq -r '[.status.state, .status.exitCode // 0, .status.reason] | join(" ")')" "CONTAINER_EXITED 0 Completed"
  check "its console reports the shutdown" logs_have machine TRIPOD-GUEST-POWEROFF
  ok "all of this, emulated, in $((SECONDS - began)) s"
}

logs_have() { "$TRIPOD" logs "$1" 2>/dev/null | grep -aq "$2"; }
has_text()  { [ -f "$1" ] && grep -aq "$2" "$1"; }
runs()      { "$TRIPOD" exec "$@" >/dev/null 2>&1; }
serves()    { [[ "$(http "$1" 80)" == *"$2"* ]]; }

has_template() { "$TRIPOD" vm template ls --config "$dir/config.toml" | grep -q '^[0-9a-f]'; }

demo_walls() {
  local began=$SECONDS ip
  say "The image of the first pod, in a machine of its own  (tripod run -r vm-oci)"
  "$TRIPOD" run -r vm-oci --name walled -d "$nginx" >/dev/null
  ip=$(pod_ip walled)
  patience=60 await "it listens" connects "$ip" 80
  check "it answers HTTP on the pod's address, $ip:80" welcomes "$ip" 80
  "$TRIPOD" exec walled uname -sr | show
  check "its kernel is not the node's  (tripod exec)" differ "$("$TRIPOD" exec walled uname -r)" "$(uname -r)"
  ok "booted, plugged in and started, emulated, in $((SECONDS - began)) s"
  patience=120 await "that machine's like has been booted, stopped and saved" has_template
  "$TRIPOD" vm template ls --config "$dir/config.toml" | show
  began=$SECONDS
  "$TRIPOD" run -r vm-oci --name cloned -d "$nginx" >/dev/null
  ip=$(pod_ip cloned)
  patience=60 await "it listens" connects "$ip" 80
  ok "the next machine continues from there: started, emulated, in $((SECONDS - began)) s  (tripod vm template)"
}

demo_edge() {
  local relay ticker sub
  say "Edge modules: the broker in the daemon, and an orchestrator  (tripod orchestrator, tripod edge)"
  start_orchestrator
  "$TRIPOD" edge runtimes | cut -c -100 | show
  mosquitto_sub -V 5 -q 1 -v -t 'demo/#' -t 'realm/proc/control/+' >"$dir/edge.log" &
  sub=$!
  await "mosquitto_sub has subscribed" edge_heard
  relay=$("$TRIPOD" edge run examples/edge/relay-c/relay.wasm --name relay --channel in=demo/tick:r:1 --channel out=demo/loud:w:1)
  ticker=$("$TRIPOD" edge run examples/edge/ticker-go/ticker.wasm --name ticker --channel out=demo/tick:w:1 -- 200ms)
  await "the modules talk" has_text "$dir/edge.log" '^demo/loud TICK 3$'
  ok "one module publishes, the other receives and republishes; mosquitto_sub sees both:"
  grep -aE '^demo/(tick|loud) ' "$dir/edge.log" | grep -v READY | head -n 6 | show
  mosquitto_pub -V 5 -q 1 -t demo/tick -m "from outside"
  await "a message of mosquitto_pub reaches the module, too" has_text "$dir/edge.log" '^demo/loud FROM OUTSIDE$'
  ok "a message of mosquitto_pub also reaches the module"
  "$TRIPOD" edge ps | show
  "$TRIPOD" pods | grep -E 'STATE|relay|ticker' | show
  ok "they are pods of this node like any others"
  "$TRIPOD" edge stop relay >/dev/null
  check "the module that was deleted is dead" same "$("$TRIPOD" edge ps "$relay" -o json | jq -r '.[0].status')" D
  await "its end is reported over MQTT" has_text "$dir/edge.log" "exited.*$relay"
  grep -a '"exited"' "$dir/edge.log" | cut -d ' ' -f 2- | jq -c .data | show
  "$TRIPOD" edge ps -a | show
  "$TRIPOD" edge stop "$ticker" >/dev/null
  kill $sub && wait $sub 2>/dev/null || true
  kill "$orchestrator_pid" && wait "$orchestrator_pid" || fail "the orchestrator failed: $(tail -n 3 "$dir/orchestrator.log")"
  orchestrator_pid=''
}

edge_heard() { mosquitto_pub -V 5 -q 1 -t demo/loud -m READY && has_text "$dir/edge.log" READY; }

demo_remove() {
  say "Stop and remove  (tripod stop, rm, rmp)"
  [ "$(leftovers | wc -l)" -gt 10 ] || fail "the search for leftovers does not find running pods"
  "$TRIPOD" stop --grace 2 client server >/dev/null
  check "stopped containers report their exit" matches "$("$TRIPOD" ps -a -o json | jq -r '[.containers[].state] | sort | unique | join(" ")')" "CONTAINER_EXITED CONTAINER_RUNNING"
  "$TRIPOD" rm client server >/dev/null
  "$TRIPOD" rmp -f pair web machine walled cloned greeter-1 greeter-2 greeter-3 >/dev/null
  check "no pod is left" same "$("$TRIPOD" pods -q)$("$TRIPOD" ps -aq)" ""
  check "the host port is closed" refuses 127.0.0.1 8080
  kill "$daemon_pid"
  wait "$daemon_pid" || fail "the daemon failed: $(tail -n 3 "$dir/daemon.log")"
  daemon_pid=''
  end_carriers
  nothing_left
}

# The session carrier of exec, attach and port-forward outlives the daemon for some minutes, for the next one. Its command
# line names its tickets, below the state directory of its daemon.
end_carriers() {
  local pid
  for pid in $(pgrep -f "^tripod sessions .*\"$state/sessions/"); do
    kill "$pid"
    await "the session carrier has ended" gone "$pid"
  done
}

refuses() { ! connects "$@"; }

nothing_left() {
  check "no process, mount, namespace, cgroup, address or interface of the pods is left" same "$(leftovers)" ""
}

leftovers() {
  local name
  for name in conmon crun runc nginx tripod-wasm qemu-system; do pgrep -l "$name" || true; done
  grep -E " ($dir/root|$state)/[^ ]+/" /proc/self/mountinfo || true
  ls -A "$dir/root/linux" "$state"/{linux,wasm,vm,vm-oci}/pods "$state/netns" "$dir"/root/{vm,vm-oci}/pods | grep -Ev ':$|^$' || true
  find /sys/fs/cgroup \( -fstype cgroup -o -fstype cgroup2 \) -path "*$TRIPOD_TEST_CGROUP/tripod-*" \
    ! -name tripod-conmon ! -name tripod-sessions -type d 2>/dev/null || true # the helpers' cgroups belong to the node, not to a pod
  find "$dir/root/network/leases" -name '[0-9]*.*' || true
  ip -o link show type veth
  ip -o link show type tun
}

demo() {
  trap end_all EXIT
  write_config
  start_registry
  start_daemon
  demo_check
  demo_pull
  demo_web
  demo_pair
  demo_streams
  demo_kill
  demo_components
  demo_machine
  demo_walls
  demo_edge
  demo_remove
  say "All checks passed in $SECONDS s; nothing is left."
}

# ---------------------------------------------------------------------------------------------- a node that stays

stay() {
  trap 'end_all; exit 0' TERM INT
  write_config
  start_registry
  start_daemon
  start_orchestrator
  touch "$dir/up"
  wait "$daemon_pid"
}

up() {
  ! running || fail "the node is already up (process $(cat $pidfile)); stop it with: $0 down"
  setsid hack/testns.sh "$PWD/hack/run.sh" __stay >build/up.log 2>&1 </dev/null &
  echo $! >$pidfile
  await "the node is up (see build/up.log)" up_ready
  cat <<TEXT
A node is up in namespaces of its own, with a registry of test images. Try:

  hack/run.sh sh tripod pull $busybox
  hack/run.sh sh tripod run $busybox --name hello -- sh -c 'while :; do date; sleep 1; done'
  hack/run.sh sh tripod logs -f hello
  hack/run.sh sh            # a shell in the node; every image in build/images/images.txt can be pulled
  make down                 # stop it and clean up
TEXT
}

running() { [ -s $pidfile ] && kill -0 "$(cat $pidfile)" 2>/dev/null; }

# in_world COMMAND...: run a command in the background node's namespaces, whose first process is the child of testns.
in_world() {
  local first
  running && first=$(pgrep -P "$(cat $pidfile)") && [ -n "$first" ] || return 1
  nsenter -t "$first" -m -n -p -i -u -- env PATH="$PWD/build/bin:$PATH" "$@"
}

up_ready() { in_world "$TRIPOD" info >/dev/null 2>&1; }

enter() {
  running || fail "no node is up; start it with: $0 up"
  if [ $# = 0 ]; then set -- bash; fi
  in_world "$@"
}

down() {
  running || { echo "no node is up"; return; }
  local pid; pid=$(cat $pidfile)
  kill "$pid"
  await "the node has ended" gone "$pid"
  rm -f $pidfile
  echo "the node and its pods have ended"
}

gone() { ! kill -0 "$1" 2>/dev/null; }

# ---------------------------------------------------------------------------------------------- start here

[ -x "$TRIPOD" ] || fail "$TRIPOD is missing: run make build first"
case ${1-demo} in
  demo) hack/images.sh build && exec hack/testns.sh -strict "$PWD/hack/run.sh" __demo ;;
  __demo) demo ;;
  up) hack/images.sh build && up ;;
  __stay) stay ;;
  sh) shift; enter "$@" ;;
  down) down ;;
  *) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
