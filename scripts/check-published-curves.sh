#!/usr/bin/env bash
# Checks that `simulate` reproduces the hit rates published by BigMoeOnEdge, to the last printed digit.
# Usage: scripts/check-published-curves.sh DATA_DIR
# DATA_DIR contains pairs of NAME.route.csv (the trace) and NAME-curve.csv (budget_mib, policy, hit_pct_cum, hit_pct_decode,
# read_mib). The policy `random` is omitted: it depends on a seed. MOE_ANALYZE is the path of the program if it is already built.
# Exit code: 0 all points are equal, 1 some points differ, 2 the check could not run.
set -euo pipefail
[ $# = 1 ] || { echo "usage: $0 DATA_DIR" >&2; exit 2; }
data=$(realpath "$1")
cd "$(dirname "$0")/.."
if [ -n "${MOE_ANALYZE:-}" ]; then
  moe=("$MOE_ANALYZE")
else
  moe=(cargo run --quiet --package moe-analyze --)
fi

# Prints the values of a column of the deterministic rows, separated by commas.
column() {
  awk -F, -v column="$1" 'NR > 1 && $2 != "random" { print $column }' "$2" | sort -u | paste -sd,
}

total=0 wrong=0
shopt -s nullglob
for curve in "$data"/*-curve.csv; do
  name=$(basename "$curve" -curve.csv)
  simulated=$("${moe[@]}" --quiet simulate "$data/$name.route.csv" --budget-mib "$(column 1 "$curve")" \
    --policy "$(column 2 "$curve")" -o csv) || exit 2
  # The comparison is numeric: 0.000 and 0 are equal.
  counts=$(awk -F, '
    FNR == 1 {
      if ($1 FS $2 FS $3 FS $4 FS $5 != "budget_mib,policy,hit_pct_cum,hit_pct_decode,read_mib") {
        print FILENAME ": line 1: the columns are not budget_mib,policy,hit_pct_cum,hit_pct_decode,read_mib" > "/dev/stderr"
        exit 2
      }
      next
    }
    NR == FNR { for (i = 3; i <= 5; i++) found[$1, $2, i] = $i; next }
    $2 != "random" {
      total++
      for (i = 3; i <= 5; i++) {
        if (!(($1, $2, i) in found) || found[$1, $2, i] + 0 != $i + 0) {
          printf "%s: line %d: published %s, simulated %s: %s\n", FILENAME, FNR, $i, found[$1, $2, i], $0 > "/dev/stderr"
          wrong++
          break
        }
      }
    }
    END { print total + 0, wrong + 0 }' <(echo "$simulated") "$curve")
  echo "$name: ${counts#* } of ${counts% *} points differ"
  total=$((total + ${counts% *})) wrong=$((wrong + ${counts#* }))
done
[ "$total" -gt 0 ] || { echo "$data: no pair of NAME.route.csv and NAME-curve.csv" >&2; exit 2; }
echo "$((total - wrong)) of $total published points are reproduced"
[ "$wrong" = 0 ]
