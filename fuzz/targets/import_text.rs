//! Importers of text files. `moe_fuzz::import` describes the layout of inputs.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use moe_foreign::Importer;

static IMPORTERS: LazyLock<Vec<&'static dyn Importer>> =
    LazyLock::new(|| moe_fuzz::importers(false));

fuzz_target!(|input: &[u8]| moe_fuzz::import(&IMPORTERS, input));
