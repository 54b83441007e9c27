#!/usr/bin/env bash
# Checks before a release that are too slow for .ci/run or need other toolchains:
#   miri          unit tests of threads and disjoint slices under Miri
#   tsan          tests of the hot cache under ThreadSanitizer: lanes, exchanges and counters of several threads
#   asan          tests of the crates with unsafe code, and of readers of mapped files, under AddressSanitizer
#   fuzz          scripts/fuzz.sh, an hour and more
#   cross         cargo check for Linux on aarch64, Windows and macOS
#   advisories    cargo deny check advisories
#   packages      compiles all packages, and installs the program from them and from the repository
#   binaries      scripts/package.sh: wheel, archive, SBOM, checksums
#   wheel         installs the wheel into a new virtual environment, and runs tests/python_package.py and all notebooks
#   archive       runs the program of the archive in a chroot that contains only the archive and the C library
#   chroot        runs the steps of scripts/docker, and installs the wheel with pip, in chroots of Debian; needs debootstrap
#   page          builds the page of the report and tests it in Chromium
#   api           compares the public API of moe-gguf and moe-placement with docs/api; MOE_BLESS=1 renews these files
#   curves        scripts/check-published-curves.sh, with the data in MOE_DATA (default ../shared/data)
# Usage: scripts/release-check.sh [PART...]
# The parts after `binaries` check its files, or those in MOE_PACKAGES, a directory that scripts/package.sh has written.
# Each part installs its tools. If that is impossible, the part is reported as "not run" with the reason. Results are written to
# docs/measurements/release-check.txt, results of fuzzing to fuzz.txt in the same directory. Exit code: 0 no part failed, 1 a part
# failed.
set -uo pipefail
cd "$(dirname "$0")/.."

cache=${MOE_ANALYZE_CI_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/moe-analyze}
host=$(rustc -vV | sed -n 's/^host: //p')
results=$cache/release-check
mkdir -p "$results"
export CARGO_TERM_COLOR=never CARGO_INCREMENTAL=0
parts=(miri tsan asan fuzz cross advisories packages binaries wheel archive chroot page api curves)
packages_dir=${MOE_PACKAGES:-$cache/release-packages}
cross_targets='aarch64-unknown-linux-gnu aarch64-linux-gnu
x86_64-pc-windows-gnu x86_64-windows-gnu
aarch64-apple-darwin aarch64-macos'

# Ends a part as "not run" with a reason.
not_run() {
  echo "not run: $1" >&3
  exit 0
}
last_line() { # LOG
  grep -v '^ *$' "$1" | tail -1
}

miri() {
  local log
  log=$(mktemp)
  if ! cargo +nightly miri --version >/dev/null 2>&1; then
    rustup toolchain install nightly --profile minimal --component miri --component rust-src >"$log" 2>&1 ||
      not_run "Miri needs a nightly toolchain: $(last_line "$log")"
  fi
  MIRIFLAGS=-Zmiri-disable-isolation CARGO_TARGET_DIR=$cache/miri \
    cargo +nightly miri test --package moe-executor --lib -- cpu::threads cpu::disjoint
}

# The standard library is compiled with the sanitizer, too: otherwise its synchronization is unknown to it.
tsan() {
  local log
  log=$(mktemp)
  rustup component add --toolchain nightly rust-src >"$log" 2>&1 ||
    rustup toolchain install nightly --profile minimal --component rust-src >"$log" 2>&1 ||
    not_run "ThreadSanitizer needs a nightly toolchain: $(last_line "$log")"
  RUSTFLAGS=-Zsanitizer=thread CARGO_TARGET_DIR=$cache/tsan \
    cargo +nightly test -Zbuild-std --target "$host" --package moe-executor --no-default-features --test it -- hot_cache:: \
    --skip cuda_models
}

asan() {
  ls "$(rustc --print target-libdir)"/librustc*_rt.asan.a >/dev/null 2>&1 ||
    not_run "the Rust toolchain has no AddressSanitizer runtime"
  # RUSTC_BOOTSTRAP allows -Z flags in a stable compiler. A test requests more memory than exists, which must fail without an abort.
  RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 CARGO_TARGET_DIR=$cache/asan \
    cargo test --target "$host" --package moe-executor --package moe-files --package moe-foreign --package moe-gguf --package moe-synth \
    --package moe-trace --lib --tests
}

fuzz() {
  ls "$(rustc --print target-libdir)"/librustc*_rt.asan.a >/dev/null 2>&1 ||
    not_run "the Rust toolchain has no AddressSanitizer runtime"
  scripts/fuzz.sh all
}

# C code of dependencies is compiled by the clang in the PyPI package ziglang.
cross() {
  local log target zig_target zig=$cache/tools/ziglang/ziglang/zig bin=$cache/tools/cross failed=0
  log=$(mktemp)
  [ -x "$zig" ] || python3 -m pip install --quiet --target "$cache/tools/ziglang" ziglang==0.15.2 >"$log" 2>&1 ||
    not_run "zig cannot be installed: $(last_line "$log")"
  mkdir -p "$bin"
  printf '#!/bin/sh\nexec "%s" ar "$@"\n' "$zig" >"$bin/ar"
  while read -r target zig_target; do
    if ! rustup target add "$target" >"$log" 2>&1; then
      echo "$target not run: $(last_line "$log")" >&3
      continue
    fi
    # Removes --target with the Rust name of the target, which zig does not accept.
    printf '#!/bin/bash\nfor arg; do shift; [[ $arg == --target=* ]] || set -- "$@" "$arg"; done\nexec "%s" cc -target %s "$@"\n' \
      "$zig" "$zig_target" >"$bin/$target"
    chmod +x "$bin/ar" "$bin/$target"
    # Checks the default members, without moe-llama-cpp. Without SDKROOT, dependencies call Apple's xcrun.
    if env "CC_${target//-/_}=$bin/$target" "AR_${target//-/_}=$bin/ar" SDKROOT="$bin" CARGO_TARGET_DIR="$cache/cross" \
      cargo check --locked --target "$target"; then
      echo "$target passed" >&3
    else
      echo "$target failed" >&3
      failed=1
    fi
  done <<<"$cross_targets"
  return $failed
}

advisories() {
  local log deny=$cache/tools/bin/cargo-deny
  log=$(mktemp)
  [ -x "$deny" ] || cargo install --quiet --debug --locked --root "$cache/tools" cargo-deny >"$log" 2>&1 ||
    not_run "cargo-deny cannot be installed: $(last_line "$log")"
  "$deny" fetch db >"$log" 2>&1 || not_run "the advisory database cannot be fetched: $(last_line "$log")"
  "$deny" check advisories
}

# The packages are not published yet, so Cargo is directed to their extracted files.
packages() {
  local work target=$cache/packages package name patches=()
  work=$(mktemp -d)
  git clone --quiet . "$work/clone" || return 1
  rm -rf "$target/package"
  (cd "$work/clone" && CARGO_TARGET_DIR=$target cargo package --workspace --exclude moe-testkit) || return 1
  for package in "$target"/package/*.crate; do
    tar -xzf "$package" -C "$work" || return 1
    package=$work/$(basename "$package" .crate)
    name=$(sed -n 's/^name = "\(.*\)"$/\1/p' "$package/Cargo.toml" | head -1)
    patches+=(--config "patch.crates-io.$name.path='$package'")
  done
  CARGO_TARGET_DIR=$target cargo install --debug --root "$work/packaged" --path "$work"/moe-analyze-* "${patches[@]}" || return 1
  CARGO_TARGET_DIR=$target cargo install --debug --locked --root "$work/installed" --path crates/moe-analyze || return 1
  # The built-in model is in the package.
  "$work/packaged/bin/moe-analyze" record --n-predict 8 --out "$work/run" &&
    "$work/installed/bin/moe-analyze" info "$work/run" && rm -rf "$work"
}

binaries() {
  [ -z "${MOE_PACKAGES:-}" ] || not_run "MOE_PACKAGES is set"
  CARGO_TARGET_DIR=$cache/binaries scripts/package.sh "$packages_dir" || return 1
  (cd "$packages_dir" && sha256sum --check --strict SHA256SUMS)
}

# The path of the package that matches a pattern.
package() { # PATTERN
  local files
  files=("$packages_dir"/$1)
  [ -f "${files[0]}" ] || not_run "$packages_dir/$1 does not exist; run the part binaries first"
  echo "${files[0]}"
}

wheel() {
  local wheel work
  wheel=$(package 'moe_analyze-*.whl') || return 1
  [ -n "$wheel" ] || exit 0
  work=$(mktemp -d)
  python3 -m venv "$work/venv" || return 1
  export PATH="$work/venv/bin:$work/venv/Scripts:$PATH"
  unset MOE_ANALYZE PYTHONPATH
  python -m pip install --quiet "$wheel[arrow,pandas,polars,zstd]" --requirement notebooks/requirements.txt || return 1
  moe-analyze --quiet record --model fixtures/tiny-qwen3moe-Q4_K_M.gguf --prompt "The kernel driver" --n-predict 12 --out "$work/run" &&
    moe-analyze hotness "$work/run" --plot "$work/hotness.png" && python tests/python_package.py "$work/run" || return 1
  local notebook
  for notebook in 01-first-look 02-access-patterns 04-how-big-a-cache; do
    MOE_RUN=$work/run python -c "import nbclient, nbformat, sys
nbclient.NotebookClient(nbformat.read(sys.argv[1], 4), kernel_name='python3').execute()" "notebooks/$notebook.ipynb" || return 1
  done
  rm -rf "$work"
}

# Nothing but the program and the libraries that it names: no shell, no other files.
archive() {
  local archive root library
  [ "$(id -u)" = 0 ] || not_run "chroot needs root"
  archive=$(package "moe-analyze-*-$host.tar.xz") || return 1
  [ -n "$archive" ] || exit 0
  root=$(mktemp -d)
  tar -xJf "$archive" --strip-components 1 -C "$root" || return 1
  mkdir "$root/tmp"
  for library in $(ldd "$root/bin/moe-analyze" | grep -o '/[^ ]*'); do
    install -D "$library" "$root$library" || return 1
  done
  env -i PATH=/bin "$(type -P chroot)" "$root" moe-analyze record --n-predict 8 --out /tmp/run &&
    env -i PATH=/bin "$(type -P chroot)" "$root" moe-analyze hotness /tmp/run --out /tmp/learn.json --plot /tmp/hotness.png &&
    ls -l "$root/tmp/hotness.png" && rm -rf "$root"
}

# Runs a command in a chroot, with /proc, in a mount namespace of its own: no mount remains.
in_chroot() { # ROOT COMMAND...
  unshare --mount --pid --fork --kill-child -- sh -c 'mount -t proc proc "$1/proc" && exec chroot "$@"' sh "$@"
}

chroot() {
  local log base root image wheel
  log=$(mktemp)
  [ "$(id -u)" = 0 ] || not_run "chroot needs root"
  package "moe-analyze-*-$host.tar.xz" >/dev/null || return 1
  wheel=$(package 'moe_analyze-*.whl') || return 1
  [ -n "$wheel" ] || exit 0
  command -v debootstrap >/dev/null || apt-get install --quiet --yes debootstrap >"$log" 2>&1 ||
    not_run "debootstrap cannot be installed: $(last_line "$log")"
  base=$cache/chroot-bookworm
  if [ ! -f "$base/complete" ]; then
    rm -rf "$base"
    debootstrap --variant=minbase bookworm "$base" >"$log" 2>&1 || not_run "Debian cannot be installed: $(last_line "$log")"
    touch "$base/complete"
  fi
  root=$(mktemp -d)
  for image in cpu cuda python; do
    rm -rf "${root:?}"/*
    cp -a "$base/." "$root" || return 1
    mkdir "$root/packages"
    # The name servers and certificates of this machine.
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    [ ! -f /etc/ssl/certs/ca-certificates.crt ] || cp /etc/ssl/certs/ca-certificates.crt "$root/host.crt"
    cp "$packages_dir"/* "$root/packages" && cp -r scripts/docker "$root/docker" || return 1
    echo "-- $image"
    if [ $image = python ]; then
      in_chroot "$root" sh -euc '
        apt-get update -qq
        apt-get install -qq -o Dpkg::Use-Pty=0 --no-install-recommends python3-venv >/dev/null
        [ ! -f /host.crt ] || install -D /host.crt /etc/ssl/certs/ca-certificates.crt
        python3 -m venv /venv
        /venv/bin/pip install --quiet /packages/moe_analyze-*.whl
        PATH=/venv/bin:$PATH
        cd /tmp
        moe-analyze record --n-predict 32 --out run
        moe-analyze hotness run --plot hotness.png
        python -c "import moe_analyze; print(len(moe_analyze.read_run(\"run\").records), \"records\")"
        ls -l hotness.png' || return 1
      continue
    fi
    # The steps in the Dockerfile are those that run here.
    grep -q '^    /docker/install.sh /packages$' "scripts/docker/Dockerfile.$image" || return 1
    in_chroot "$root" /docker/install.sh /packages || return 1
    # Without a driver, the CPU runs the model.
    in_chroot "$root" setpriv --reuid moe --regid moe --clear-groups sh -euc '
      cd /data
      moe-analyze record --device auto --n-predict 8 --out run
      moe-analyze hotness run --plot hotness.png
      ls -l hotness.png' || return 1
  done
  rm -rf "$root"
}

api() {
  local log tool=$cache/tools/bin/cargo-public-api version=0.52.0 crate failed=0
  log=$(mktemp)
  if ! "$tool" --version 2>/dev/null | grep -q " $version$"; then
    cargo install --quiet --debug --locked --force --root "$cache/tools" "cargo-public-api@$version" >"$log" 2>&1 ||
      not_run "cargo-public-api cannot be installed: $(last_line "$log")"
  fi
  for crate in moe-gguf moe-placement; do
    # RUSTC_BOOTSTRAP allows the JSON output of rustdoc in a stable compiler.
    RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR=$cache/api cargo rustdoc --package "$crate" --lib -- -Zunstable-options --output-format json ||
      return 1
    "$tool" -sss --rustdoc-json "$cache/api/doc/${crate//-/_}.json" >"$log" || return 1
    [ -z "${MOE_BLESS:-}" ] || zstd -q -f -19 "$log" -o "docs/api/$crate.txt.zst"
    zstd -dc "docs/api/$crate.txt.zst" | diff -u - "$log" || failed=1
  done
  return $failed
}

page() {
  command -v npm >/dev/null || not_run "npm is missing"
  command -v chromium >/dev/null || not_run "chromium is missing"
  scripts/report-page.sh --test
}

curves() {
  local data=${MOE_DATA:-../shared/data}/bigmoeonedge
  [ -d "$data" ] || not_run "$data does not exist; set MOE_DATA to the directory of the data"
  scripts/check-published-curves.sh "$data"
}

selected=("$@")
[ $# -gt 0 ] || selected=("${parts[@]}")
for part in "${selected[@]}"; do
  [[ " ${parts[*]} " == *" $part "* ]] || { echo "no part $part; parts: ${parts[*]}" >&2; exit 2; }
done
for part in "${selected[@]}"; do
  echo "== $part"
  start=$SECONDS
  notes=$(mktemp)
  ("$part") 3>"$notes" 2>&1 | tee "$results/$part.log"
  code=${PIPESTATUS[0]}
  if [ "$code" != 0 ]; then
    result="failed: $(grep -E '^(error|test .* FAILED|.*panicked|.*ERROR: )' "$results/$part.log" | tail -1)"
  elif grep -q '^not run' "$notes"; then
    result=$(cat "$notes")
  else
    n=$(grep -E '^test result: ok' "$results/$part.log" | awk '{ n += $4 } END { print n + 0 }')
    result=passed
    [ "$n" = 0 ] || result="passed, $n tests"
    [ ! -s "$notes" ] || result=$(paste -sd';' "$notes" | sed 's/;/; /g')
  fi
  printf '%-11s %s %6d s  %s\n' "$part" "$(git rev-parse --short HEAD)" $((SECONDS - start)) "$result" |
    sed -e "s|$cache|CACHE|g" -e "s|$PWD|.|g" -e "s|$HOME|~|g" | tee "$results/$part.txt"
done

# Parts that were not selected keep their line.
report=docs/measurements/release-check.txt
{
  echo "# scripts/release-check.sh, $(rustc --version), $host: part, commit, time, result"
  for part in "${parts[@]}"; do
    if [ "$part" = fuzz ]; then
      printf '%-11s see fuzz.txt\n' "$part"
    elif [[ " ${selected[*]} " == *" $part "* ]]; then
      cat "$results/$part.txt"
    else
      grep "^$part " "$report" || printf '%-11s not run yet\n' "$part"
    fi
  done
} >"$results/report"
cp "$results/report" "$report"
cat "$report"
! grep -q failed "$report"
