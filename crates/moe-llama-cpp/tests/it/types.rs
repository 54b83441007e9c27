//! Every type of weights, on a model that is made of it.

use moe_gguf::GgmlType;

use crate::compare::{Exact, Spread};
use crate::models::{fixture, in_type, make, small};

fn exactly(like: &str, quants: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let mut exact = Exact::default();
    for quant in quants {
        let name = format!("{like}-{quant}");
        let path = make(dir.path(), &name, &small(like, quant));
        exact.holds(&name, &path);
    }
    exact.end();
}

fn within_spread(models: &[(&str, &[&str])]) {
    let dir = tempfile::tempdir().unwrap();
    let mut spread = Spread::default();
    for (like, quants) in models {
        for quant in *quants {
            let name = format!("{like}-{quant}");
            let path = make(dir.path(), &name, &small(like, quant));
            spread.holds(&name, &path);
        }
    }
    spread.end();
}

#[test]
fn floats() {
    exactly("qwen3-30b-a3b", &["F32", "F16", "BF16"]);
}

#[test]
fn blocks_of_32() {
    let quants = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"];
    within_spread(&[("qwen3-30b-a3b", &quants)]);
}

#[test]
fn super_blocks() {
    let quants = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_K_M"];
    within_spread(&[("qwen3-30b-a3b", &quants)]);
}

#[test]
fn codebooks() {
    let quants = [
        "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M",
    ];
    within_spread(&[("qwen3-30b-a3b", &quants)]);
}

#[test]
fn four_bit_floats_and_ternary() {
    let quants = ["MXFP4", "NVFP4", "TQ1_0", "TQ2_0"];
    within_spread(&[("qwen3-30b-a3b", &quants)]);
}

#[test]
fn other_architectures_in_other_types() {
    within_spread(&[
        ("gpt-oss-20b", &["MXFP4", "Q8_0"]),
        ("mixtral-8x7b", &["Q4_K_M", "Q5_0"]),
        ("olmoe-1b-7b", &["Q4_K_M", "Q6_K"]),
    ]);
}

/// Fixtures in types that the quantizer of ggml made of them.
#[test]
fn fixtures_in_other_types() {
    let dir = tempfile::tempdir().unwrap();
    let (mut exact, mut spread) = (Exact::default(), Spread::default());
    for model in ["random-dots1-F16", "random-qwen2moe-F16"] {
        let file = fixture(format!("{model}.gguf"));
        for ty in [GgmlType::F32, GgmlType::BF16] {
            let path = in_type(dir.path(), &file, ty);
            exact.holds(&format!("{model}-{}", ty.name()), &path);
        }
        for ty in [GgmlType::Q8_0, GgmlType::Q4_0] {
            let path = in_type(dir.path(), &file, ty);
            spread.holds(&format!("{model}-{}", ty.name()), &path);
        }
    }
    exact.end();
    spread.end();
}

#[test]
fn trained_models() {
    let mut spread = Spread::default();
    for model in ["tiny-qwen3moe-Q4_K_M", "tiny-gpt-oss-MXFP4"] {
        spread.holds(model, &fixture(format!("{model}.gguf")));
    }
    spread.end();
}
