#!/usr/bin/env bash
# Builds the page of the report from its source, and compares it with the page in the repository.
#   --write  replaces the page in the repository instead
#   --test   also tests the page in Chromium (`chromium` in PATH)
set -euo pipefail
cd "$(dirname "$0")/../crates/moe-report/web"

kept=$(mktemp -d)
trap 'rm -rf "$kept"' EXIT
cp dist/report.html.gz "$kept/"
gzip -dc dist/report.html.gz > "$kept/report.html"

# Not `npm ci`: it requires entries of optional packages for other systems, which not every registry has.
PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD=1 npm install --no-save --no-audit --no-fund --silent
npm run --silent check
npm run --silent build
if [ "${1-}" != --write ]; then
  # The compressed bytes depend on the version of zlib.
  cp "$kept/report.html.gz" dist/
  if ! cmp "$kept/report.html" dist/report.html; then
    echo "dist/report.html.gz differs from the built page: run scripts/report-page.sh --write" >&2
    exit 1
  fi
  echo "the page of the report is up to date"
fi
if [ "${1-}" = --test ]; then
  npm test
fi
