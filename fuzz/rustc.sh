#!/usr/bin/env bash
# RUSTC_WRAPPER of scripts/fuzz.sh: crates of this repository get the coverage that guides libFuzzer, and AddressSanitizer.
# Dependencies are compiled as usual, so that the coverage is that of the code under test.
case ${CARGO_MANIFEST_DIR:-/registry/} in
  */registry/*) exec "$@" ;;
esac
# Makes -Z flags available in a stable compiler.
export RUSTC_BOOTSTRAP=1
exec "$@" -Zsanitizer=address -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
  -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Ccodegen-units=1
