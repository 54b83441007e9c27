#!/usr/bin/env bash
# The checks of .ci/run that need nothing but Rust: the tests of all crates except moe-llama-cpp, and the demo. They run on Linux, macOS and
# Windows. Tests that need Python or a C compiler are skipped if it is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo test --locked
export MOE_ANALYZE=${CARGO_TARGET_DIR:-target}/debug/moe-analyze
scripts/demo.sh target/demo
