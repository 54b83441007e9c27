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

/// Architectures that route all tokens in the last layer.
const ALL_ROUTED: [&str; 3] = ["nemotron_h_moe", "qwen35moe", "qwen3next"];

/// In the last layer, one of the 20 tokens of the prompt is routed in most architectures.
#[test]
fn number_of_records_is_close_to_its_bound() {
    let dir = tempfile::tempdir().unwrap();
    let prompt: Vec<u32> = (300..320).collect();
    for path in models(dir.path()) {
        let file = path.to_str().unwrap();
        let recorded = record(file, &prompt, LIMITS, RunOptions::default());
        let n_records = recorded.records.len() as u64;
        let is_all = ALL_ROUTED
            .iter()
            .any(|arch| path.ends_with(format!("{arch}.gguf")));
        let n_other = if is_all { 0 } else { 19 * 3 };
        assert_eq!(recorded.max_records - n_records, n_other, "{file}");
    }
}
