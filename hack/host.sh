#!/bin/bash
# host.sh ssh DIR [COMMAND]: a shell or a command in the machine that the tests of test/host keep in DIR (TRIPOD_TEST_HOST=DIR)
# host.sh down DIR: end that machine
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,3s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
action=$1 dir=$2
shift 2
case $action in
  ssh) exec ssh -q -i "$dir/key" -p "$(cat "$dir/port")" -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null root@127.0.0.1 "$@" ;;
  down) kill "$(cat "$dir/pid")" && rm -f "$dir/pid" "$dir/port" ;;
  *) echo "host.sh: unknown action $action" >&2; exit 2 ;;
esac
