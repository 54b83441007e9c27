//! Models of the architectures in `fixtures/architectures`.

use std::path::{Path, PathBuf};

use moe_gguf::GgmlType;
use moe_synth::model::{Description, Synth};
use moe_testkit::fixture;

use super::{LIMITS, RunOptions, record};

/// Writes an F16 model of each description.
pub fn models(dir: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(fixture("architectures")).unwrap();
    let paths = files.map(|file| {
        let json = std::fs::read(file.unwrap().path()).unwrap();
        let description: Description = serde_json::from_slice(&json).unwrap();
        let synth = Synth::described(&description, GgmlType::F16, 5).unwrap();
        let path = dir.join(format!("{}.gguf", description.arch));
        std::fs::write(&path, synth.write(Vec::new()).unwrap()).unwrap();
        path
    });
    paths.collect()
}

/// Architectures that select the output rows after the last layer, so that all tokens are routed in all layers.
const ALL_ROUTED: [&str; 3] = ["cohere2moe", "gemma4", "step35"];

/// In the last layer, one of the 20 tokens of the prompt is routed, except in [`ALL_ROUTED`].
#[test]
fn number_of_records_is_close_to_its_bound() {
    let dir = tempfile::tempdir().unwrap();
    let prompt: Vec<u32> = (300..320).collect();
    for path in models(dir.path()) {
        let file = path.to_str().unwrap();
        let recorded = record(file, &prompt, LIMITS, RunOptions::default());
        let n_records = recorded.records.len() as u64;
        let all_routed = ALL_ROUTED.iter().any(|arch| file.contains(arch));
        let n_not_routed = if all_routed { 0 } else { 19 };
        let difference = recorded.max_records - n_records;
        assert_eq!(difference, n_not_routed * 3, "{file}");
    }
}
