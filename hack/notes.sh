#!/bin/bash
# notes.sh [VERSION]: print what CHANGELOG.md says about a version. Without a version, or for one with -dev, print what is
# not released yet. Fails if there is nothing to print.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

section=${1-Unreleased}
case $section in *-dev*) section=Unreleased ;; esac

# The heading is "## Unreleased" or "## 0.1.0 - 2026-12-01".
notes=$(awk -v section="$section" '/^## / {inside = $2 == section; next} inside' CHANGELOG.md | sed -e '/./,$!d')
if [ -z "$notes" ]; then
  echo "notes: CHANGELOG.md says nothing about $section" >&2
  exit 1
fi
printf '%s\n' "$notes"
