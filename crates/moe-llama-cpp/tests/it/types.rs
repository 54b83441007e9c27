//! Executor and llama.cpp agree for all types of weights.

use moe_gguf::GgmlType;

use crate::compare::{Exact, Spread};
use crate::models::{fixture, in_type, make, small};

fn exactly(like: &str, quants: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let mut exact = Exact::default();
    for quant in quants {
        let name = format!("{like}-{quant}");
        let path = make(dir.path(), &name, &small(like, quant));
        exact.compare(&name, &path);
    }
    exact.check_all();
}

fn within_spread(models: &[(&str, &[&str])]) {
    let dir = tempfile::tempdir().unwrap();
    let mut spread = Spread::default();
    for (like, quants) in models {
        for quant in *quants {
            let name = format!("{like}-{quant}");
            let path = make(dir.path(), &name, &small(like, quant));
            spread.compare(&name, &path);
        }
    }
    spread.check_all();
}

#[test]
fn agree_on_floats() {
    exactly("qwen3-30b-a3b", &["F32", "F16", "BF16"]);
}

#[test]
fn agree_on_blocks_of_32() {
    let quants = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"];
    within_spread(&[("qwen3-30b-a3b", &quants)]);
}

#[test]
fn agree_on_super_blocks() {
    let quants = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_K_M"];
    within_spread(&[("qwen3-30b-a3b", &quants)]);
}

#[test]
fn agree_on_codebooks() {
    let quants = [
        "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M",
    ];
    within_spread(&[("qwen3-30b-a3b", &quants)]);
}

#[test]
fn agree_on_four_bit_floats_and_ternary() {
    let quants = ["MXFP4", "NVFP4", "TQ1_0", "TQ2_0"];
    within_spread(&[("qwen3-30b-a3b", &quants)]);
}

#[test]
fn agree_on_other_architectures() {
    within_spread(&[
        ("gpt-oss-20b", &["MXFP4", "Q8_0"]),
        ("mixtral-8x7b", &["Q4_K_M", "Q5_0"]),
        ("olmoe-1b-7b", &["Q4_K_M", "Q6_K"]),
    ]);
}

/// Fixtures converted by ggml's quantizer.
#[test]
fn agree_on_converted_fixtures() {
    let dir = tempfile::tempdir().unwrap();
    let (mut exact, mut spread) = (Exact::default(), Spread::default());
    for model in ["random-dots1-F16", "random-qwen2moe-F16"] {
        let file = fixture(format!("{model}.gguf"));
        for ty in [GgmlType::F32, GgmlType::BF16] {
            let path = in_type(dir.path(), &file, ty);
            exact.compare(&format!("{model}-{}", ty.name()), &path);
        }
        for ty in [GgmlType::Q8_0, GgmlType::Q4_0] {
            let path = in_type(dir.path(), &file, ty);
            spread.compare(&format!("{model}-{}", ty.name()), &path);
        }
    }
    exact.check_all();
    spread.check_all();
}

#[test]
fn agree_on_trained_models() {
    let mut spread = Spread::default();
    for model in ["tiny-qwen3moe-Q4_K_M", "tiny-gpt-oss-MXFP4"] {
        spread.compare(model, &fixture(format!("{model}.gguf")));
    }
    spread.check_all();
}
