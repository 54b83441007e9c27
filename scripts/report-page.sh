#!/usr/bin/env bash
# Builds the page of the report from its source, and compares it with the page in the repository.
#   --write       replaces the page in the repository instead
#   --test        also tests the page in Chromium (`chromium` in PATH)
#   --screenshot  replaces the screenshot of the README: the report of a run of a fixture. MOE_ANALYZE is the program
#   --speed       measures the page in Chromium, and replaces docs/measurements/report-page.txt
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
cd "$repository/crates/moe-report/web"

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
case "${1-}" in
--test)
  npm test
  ;;
--screenshot)
  program=${MOE_ANALYZE:-$repository/target/release/moe-analyze}
  prompt="The kernel driver is responsible for"
  (
    cd "$kept"
    ln -s "$repository/fixtures" .
    run=(record --threads 1 --model fixtures/tiny-qwen3moe-Q4_K_M.gguf --prompt "$prompt" --n-predict 64 --keep-prompt)
    "$program" "${run[@]}" --out runs/first
    "$program" hotness runs/first --out learn.json
    "$program" "${run[@]}" --policy hot-cache --hot-cache learn.json --hot-cache-mib 2 --hot-cache-device CPU --out runs/hot
    "$program" report runs/hot --out own.html
  )
  REPORT=$kept/own.html SCREENSHOT=$repository/docs/plots/report.png npm test -- screenshot
  ;;
--speed)
  output=$repository/docs/measurements/report-page.txt
  {
    echo "scripts/report-page.sh --speed, $(date -u +%F)"
    echo "$(chromium --version), headless, 1440 × 900 pixels, $(nproc) CPU cores, load average $(cut -d" " -f1 /proc/loadavg)"
    echo "Synthetic reports with 24 layers of 64 experts. The times start when the browser opens the file."
    echo
  } > "$output"
  SPEED=$output npm test -- speed
  ;;
esac
