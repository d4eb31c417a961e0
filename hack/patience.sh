#!/bin/bash
# patience.sh TEXT COMMAND...: run a command, and say every 20 seconds that it is not done yet.
set -euo pipefail
text=$1
shift
(while :; do
  read -rt 20 <> <(:) || : # a pause without a process, which would outlive us
  printf '%s: not done after %d s\n' "$text" "$SECONDS"
done) &
trap 'kill $!' EXIT
"$@"
