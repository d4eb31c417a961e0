#!/bin/bash
# notes.sh [VERSION]: print what CHANGELOG.md says of a version; without one, or for a version with -dev, what is not released
# yet. Fails when that is nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

section=${1-Unreleased}
case $section in *-dev*) section=Unreleased ;; esac

# The heading is "## Unreleased" or "## 0.1.0 - 2026-12-01".
notes=$(awk -v section="$section" '/^## / {inside = $2 == section; next} inside' CHANGELOG.md | sed -e '/./,$!d')
if [ -z "$notes" ]; then
  echo "notes: CHANGELOG.md says nothing of $section" >&2
  exit 1
fi
printf '%s\n' "$notes"
