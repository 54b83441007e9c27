#!/usr/bin/env bash
# Prints the sizes that docs/measurements/size.txt records: tracked files, dependencies, builds.
#
#   scripts/size.sh [tree] [dependencies] [release] [dist] > docs/measurements/size.txt
#
# Default: all parts. `release` and `dist` build the program in an empty target directory, which takes tens of minutes.
# FEATURES is a list of feature sets, separated by spaces. Default: the default features with and without `sql`. TARGET is a target
# directory whose contents are replaced and that keeps the last build; by default a temporary directory.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${TARGET:-$(mktemp -d)}
[ -n "${TARGET:-}" ] || trap 'rm -rf "$target"' EXIT
mkdir -p "$target"
export CARGO_TERM_COLOR=never CARGO_INCREMENTAL=0

mib() { awk -v bytes="$1" 'BEGIN { printf "%.1f MiB", bytes / 1048576 }'; }

tree() {
  local total
  total=$(git ls-files -z | du --files0-from=- -bc | sed -n "s,\ttotal$,,p")
  printf '\n== tracked files: %s bytes, %s\n' "$total" "$(mib "$total")"
  git ls-files -z | du --files0-from=- -b | sort -rn | sed -n 1,15p
}

dependencies() {
  printf '\n== dependencies of the program (Linux)\n'
  local features
  for features in ${FEATURES:-$default $without_sql}; do
    echo "$features: $(tree_of "$features" --prefix none | sort -u | wc -l) packages"
  done
  echo "several versions:"
  tree_of "$default" --duplicates --depth 0 | grep . | sed 's/^/  /'
}

tree_of() {
  cargo tree --package moe-analyze --edges normal --target x86_64-unknown-linux-gnu --no-default-features --features "$@"
}

# Builds the program with a profile in an empty target directory. Prints the CPU time of all processes, and the program size.
build() {
  local profile=$1 features times
  for features in ${FEATURES:-$default $without_sql}; do
    rm -rf "${target:?}"/*
    TIMEFORMAT='%R %U %S'
    times=$({ time cargo build --quiet --package moe-analyze --profile "$profile" --no-default-features \
      --features "$features" --target-dir "$target" >&2; } 2>&1 | tail -1)
    awk -v times="$times" -v what="$profile, $features" -v bytes="$(stat -c %s "$target/$profile/moe-analyze")" 'BEGIN {
      split(times, t, " ")
      printf "%s: %.1f CPU minutes, %.1f minutes, %d bytes = %.1f MB\n", what, (t[2] + t[3]) / 60, t[1] / 60, bytes, bytes / 1e6
    }'
  done
}

default=$(sed -n 's/^default = \[\(.*\)\]/\1/p' crates/moe-analyze/Cargo.toml | tr -d '" ')
without_sql=${default/,sql/}

echo "date       $(date -u +%F)"
echo "machine    $(lscpu | sed -n 's/^Model name: *//p' | head -1), $(nproc) CPUs, $(uname -sr)"
echo "compiler   $(rustc --version)"
echo "commit     $(git rev-parse --short HEAD)"
for part in ${*:-tree dependencies release dist}; do
  case $part in
    tree) tree ;;
    dependencies) dependencies ;;
    release | dist) printf '\n== %s\n' "profile $part, empty target directory"; build "$part" ;;
    *) echo "$0: unknown part $part (tree, dependencies, release, dist)" >&2; exit 2 ;;
  esac
done
