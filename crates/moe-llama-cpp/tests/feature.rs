//! Without the feature `llama-cpp` this crate is empty, and its tests are not built.
#![cfg(not(feature = "llama-cpp"))]

use moe_testkit::{Need, skip};

#[test]
fn oracle() {
    skip(Need::LlamaCpp, "built without the feature llama-cpp");
}
