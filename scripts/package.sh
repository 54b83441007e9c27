#!/usr/bin/env bash
# Builds the files of a binary release for this machine:
#   moe_analyze-VERSION-py3-none-PLATFORM.whl   wheel: the program and the Python package moe_analyze, for glibc 2.28 or newer on Linux
#   moe-analyze-VERSION-TARGET.tar.xz           archive: bin/ and share/ with completions, manual pages, licenses (.zip on Windows)
#   moe-analyze-VERSION-TARGET.cdx.json         SBOM of the program (CycloneDX)
#   SHA256SUMS                                  checksums of all of them
# Usage: scripts/package.sh [--binary FILE] [OUT]
#   OUT           directory, whose contents are replaced (default: target/packages in the repository)
#   --binary FILE write the archive with this program; build nothing, and omit the wheel
# Needs Rust, and Python 3.11 or newer. On Linux, the C compiler is the one in the Python package ziglang.
set -euo pipefail
start=$PWD
cd "$(dirname "$0")/.."

binary=
if [ "${1:-}" = --binary ]; then
  binary=$(cd "$start" && cd "$(dirname "$2")" && pwd)/$(basename "$2")
  shift 2
fi
out=${1:-$PWD/target/packages}
[[ $out == /* || $out == ?:* ]] || out=$start/$out
cache=${MOE_ANALYZE_CI_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/moe-analyze}
target=$(rustc -vV | sed -n 's/^host: //p')
max_wheel=40000000

python=$(command -v python3 || command -v python)
mkdir -p "$out"
rm -f "$out"/moe[_-]analyze-* "$out/SHA256SUMS"
# A license file of the wheel (pyproject.toml) and of the archive.
"$python" scripts/package.py licenses "$target" crates/moe-analyze/THIRD-PARTY-LICENSES.txt

if [ -z "$binary" ]; then
  venv=$cache/package-venv
  [ -d "$venv" ] || "$python" -m venv "$venv"
  bin=$venv/bin
  [ -d "$bin" ] || bin=$venv/Scripts
  export PATH="$bin:$PATH"
  options=(--manifest-path crates/moe-analyze/Cargo.toml --profile dist --locked --out "$out")
  tools=(maturin==1.16.0)
  if [[ $target == *-linux-gnu ]]; then
    # The program loads the CUDA driver at run time, so it cannot be a static executable.
    tools+=(ziglang==0.15.2)
    options+=(--zig --compatibility manylinux_2_28)
  fi
  python -m pip install --quiet "${tools[@]}"
  maturin build "${options[@]}"
  binary=$(echo "$out"/moe_analyze-*.whl)
  size=$(wc -c <"$binary")
  [ "$size" -le $max_wheel ] || { echo "$binary has $size bytes (limit: $max_wheel)" >&2; exit 1; }
fi
"$python" scripts/package.py archive "$target" "$binary" "$out"
