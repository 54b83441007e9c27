//! Every architecture in F16: fixtures, and small models with the header of a published one.

use crate::compare::holds_exactly;
use crate::models::{N_VOCAB, fixture, make, small};

#[test]
fn fixtures() {
    for (arch, n_vocab) in [
        ("dots1", 2048),
        ("gpt-oss", 4096),
        ("llama", 2048),
        ("olmoe", 2048),
        ("qwen2moe", 2048),
        ("qwen3moe", 4096),
    ] {
        let name = format!("random-{arch}-F16");
        holds_exactly(&name, &fixture(&format!("{name}.gguf")), n_vocab);
    }
}

#[test]
fn headers_of_published_models() {
    let dir = tempfile::tempdir().unwrap();
    for like in [
        "gpt-oss-20b",
        "mixtral-8x7b",
        "olmoe-1b-7b",
        "qwen3-30b-a3b",
    ] {
        let spec = small(like, "F16");
        // gpt-oss comes with its YaRN scaling
        assert_eq!(spec.yarn.is_some(), like.starts_with("gpt-oss"));
        let path = make(dir.path(), like, &spec);
        holds_exactly(like, &path, N_VOCAB);
    }
}
