#!/bin/bash
# unit.sh [machines | packages | changed PACKAGES FLAG... | dependents PACKAGES FLAG...]: the unit tests for make, in worlds
# of their own (hack/testns.sh). With "machines", the tests that boot machines; with "packages", print the packages; the
# others are for make quick: the tests of these packages, one word with spaces, with and without the race detector.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unit=(./cmd/... ./hack/observe ./hack/quick ./hack/testreport ./internal/... ./test/sandboxtest/... ./test/edgetest/... ./test/races)

# The result of these depends on programs that are installed on the host, such as QEMU, crun, iptables, mosquitto,
# redis-server, skopeo and compilers, which Go's test cache does not see. CI runs them always.
outside=(./cmd/... ./internal/cli/... ./internal/component/... ./internal/edge/... ./internal/image/... ./internal/network/...
  ./internal/sandbox/... ./internal/stats/... ./test/edgetest/...)

# In these packages, these tests boot machines in emulation, which takes minutes. The race detector would see nothing of it
# but the driver's calls, so they run without it; make test-all (TRIPOD_TEST_FULL) runs them with it, too.
machines=(./internal/sandbox/vm/internal/libvirt ./internal/sandbox/vm/internal/qemu ./internal/sandbox/vm/internal/tap)
boots='^(TestDriver|TestRealGuest|TestGuestTakesThePodsPlace|TestLibvirtdIsAway|TestLibvirtdHangs)$'

# The tests of these build programs of ours, which Go's test cache does not see.
builders=(./internal/edge/runtime/unitpods ./internal/sandbox/vm/internal/agent)

# These interpret Go guests of 20 MB, as `tripod push` does. The interpreter takes five times as long with the race detector,
# so they run without it; make test-all (TRIPOD_TEST_FULL) runs them with it. (To compile only the interpreter without it
# gives false reports: the linker keeps one of the copies of generic code, such as that of sync.Map, for all packages.)
interpreted=(./internal/component/describe)

full=() # the race detector for what make test runs without it
[ -z "${TRIPOD_TEST_FULL-}" ] || full=(-race)
count=()
[ -z "${CI-}" ] || count=(-count=1)
code=0

# packages PATTERN...: the packages in one word
packages() { go list "$@" | tr '\n' ' '; }
# without SET PATTERN...: SET without the packages that match
without() { comm -23 <(tr ' ' '\n' <<<"$1" | sort -u) <(go list "${@:2}" | sort -u) | tr '\n' ' '; }
# world STEP.PART PACKAGES FLAG...
world() { hack/testns.sh -strict hack/gotest.sh "$1" "$2" -tags failpoints -vet=off -p 3 -timeout 15m "${@:3}" || code=1; }
export CGO_ENABLED=1 # for the Wasm engine and the race detector
export GORACE=atexit_sleep_ms=0 # otherwise each process with the race detector sleeps a second before it exits

case ${1-} in
  '')
    all=$(packages "${unit[@]}") field=$(packages "${outside[@]}")
    world test-unit.pure "$(without "$all" "${outside[@]}")" -race
    world test-unit.outside "$(without "$field" "${machines[@]}" "${builders[@]}" "${interpreted[@]}")" -race "${count[@]}"
    world test-unit.interpreted "$(packages "${interpreted[@]}")" "${full[@]}" "${count[@]}"
    [ -z "${TRIPOD_TEST_FULL-}" ] || TRIPOD_TEST_QUICK=1 world test-unit.quick-code ./internal/component/engine "${count[@]}"
    world test-unit.builders "$(packages "${builders[@]}")" -race -count=1
    world test-unit.machines "$(packages "${machines[@]}")" -race -skip "$boots" "${count[@]}"
    hack/gotest.sh test-unit.rules './test/deps/... ./test/guestbuild ./test/harness/...' -vet=off "${count[@]}" || code=1
    hack/gotest.sh test-unit.allocations ./internal/component/protowit -vet=off -run TestNoAllocations || code=1
    (cd sdk/go && ../../hack/gotest.sh test-unit.sdk ./... -vet=off -race "${count[@]}") || code=1
    ;;
  machines)
    world test-machines "$(packages "${machines[@]}")" -run "$boots" "${full[@]}" "${count[@]}"
    ;;
  changed) world quick.changed "$2" -race "${@:3}" ;;
  dependents) world quick.dependents "$2" "${@:3}" ;;
  packages) echo "${unit[@]}" ;;
  *)
    echo "usage: hack/unit.sh [machines | packages | changed PACKAGES FLAG... | dependents PACKAGES FLAG...]" >&2
    exit 2
    ;;
esac
exit "$code"
