//! Synthetic models.

use std::io::Write;

use moe_gguf::check::check;
use moe_gguf::map::{Category, OffsetMap};
use moe_gguf::verify::{Algorithm, verify};
use moe_gguf::{GgmlType, Gguf};
use moe_synth::model::{Description, Error, Key, Spec, Synth, SynthOptions};
use moe_testkit::{Need, skip};

/// Writes a sparse file with the header of a model. `None` if the file system has no sparse files.
#[track_caller]
fn sparse(spec: &Spec) -> Option<(tempfile::NamedTempFile, Gguf)> {
    let synth = Synth::new(spec, SynthOptions::default()).unwrap();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&synth.header_bytes().unwrap()).unwrap();
    let size = synth.file_size().unwrap();
    if let Err(error) = file.as_file().set_len(size) {
        skip(Need::SparseFiles, format_args!("{size} bytes: {error}"));
        return None;
    }
    let gguf = Gguf::open(file.path()).unwrap();
    Some((file, gguf))
}

fn n_parameters(gguf: &Gguf) -> u64 {
    let count = |t: &moe_gguf::Tensor| t.ne.iter().product::<u64>();
    gguf.tensors().iter().map(count).sum()
}

/// Name, number of tensors and number of parameters, as printed by llama.cpp for the published files.
const KNOWN: [(&str, usize, u64); 6] = [
    ("gpt-oss-20b", 459, 20_914_757_184),
    ("gpt-oss-120b", 687, 116_829_156_672),
    ("qwen3-30b-a3b", 579, 30_532_122_624),
    ("qwen3-next-80b", 843, 79_674_391_296),
    ("mixtral-8x7b", 323, 46_702_792_704),
    ("olmoe-1b-7b", 195, 6_919_161_856),
];

#[test]
fn presets_have_published_numbers_of_tensors_and_parameters() {
    assert_eq!(KNOWN.map(|known| known.0), Spec::PRESETS);
    for (name, n_tensors, parameters) in KNOWN {
        let spec = Spec::like(name).unwrap();
        let Some((_file, gguf)) = sparse(&spec) else {
            return;
        };
        assert_eq!(gguf.tensors().len(), n_tensors, "{name}");
        assert_eq!(n_parameters(&gguf), parameters, "{name}");
        let report = check(&gguf);
        assert!(
            report.is_sound() && report.llama_cpp_refuses.is_empty(),
            "{name}"
        );
        let experts = OffsetMap::new(&gguf).rows;
        let experts = experts
            .iter()
            .filter(|row| row.category == Category::Expert)
            .count() as u64;
        assert_eq!(
            experts,
            3 * spec.n_expert * u64::from(spec.n_layer),
            "{name}"
        );
        let arch = spec.arch.name();
        let n_expert = gguf
            .metadata()
            .u64(&format!("{arch}.expert_count"))
            .unwrap();
        assert_eq!(n_expert, Some(spec.n_expert), "{name}");
        let tokens = gguf
            .metadata()
            .strings("tokenizer.ggml.tokens")
            .unwrap()
            .unwrap();
        assert_eq!(tokens.len() as u32, spec.vocab.n_tokens, "{name}");
    }
}

#[test]
fn gpt_oss_20b_has_published_sizes() {
    let Some((_file, gguf)) = sparse(&Spec::like("gpt-oss-20b").unwrap()) else {
        return;
    };
    assert_eq!(gguf.metadata().len(), 37);
    assert_eq!(gguf.files()[0].data_offset, 13_008_832);
    let experts = gguf.tensor("blk.0.ffn_gate_exps.weight").unwrap();
    assert_eq!(
        (experts.ty, experts.ne),
        (GgmlType::MXFP4, [2880, 2880, 32, 1])
    );
    assert_eq!(experts.size_bytes, 141_004_800);
    let rows = OffsetMap::new(&gguf).rows;
    assert_eq!(rows.len(), 2_691);
    let experts = rows.iter().filter(|row| row.expert_id.is_some());
    assert_eq!(experts.clone().count(), 2_304);
    assert!(experts.clone().all(|row| row.size_bytes == 4_406_400));
    let report = check(&gguf);
    assert_eq!(
        (
            report.overlaps.len(),
            report.gaps.len(),
            report.past_end.len()
        ),
        (0, 0, 0)
    );
    assert_eq!(report.tensor_bytes, 13_779_630_336);
    let merges = gguf
        .metadata()
        .strings("tokenizer.ggml.merges")
        .unwrap()
        .unwrap();
    assert_eq!(merges.len(), 446_189);
}

#[test]
fn number_of_layers_can_be_reduced() {
    let mut spec = Spec::like("qwen3-30b-a3b").unwrap();
    spec.n_layer = 2;
    let synth = Synth::new(&spec, SynthOptions::default()).unwrap();
    assert_eq!(synth.tensors().len(), 2 * 12 + 3);
}

#[test]
fn rejects_more_experts_than_an_offset_map_may_have() {
    let mut spec = small("Q4_0");
    (spec.n_layer, spec.n_expert) = (96, 1024);
    let Some((_file, gguf)) = sparse(&spec) else {
        return;
    };
    let rows = OffsetMap::new(&gguf).rows;
    let is_expert = |row: &&moe_gguf::map::MapRow| row.category == Category::Expert;
    assert_eq!(rows.iter().filter(is_expert).count(), 294_912);
    spec.n_layer = 107;
    let error = Synth::new(&spec, SynthOptions::default()).err().unwrap();
    assert!(
        matches!(
            error,
            Error::Spec {
                key: "n_expert",
                ..
            }
        ),
        "{error}"
    );
}

fn small(quant: &str) -> Spec {
    let text = format!(
        r#"{{"arch": "qwen3next", "n_layer": 4, "n_embd": 256, "n_head": 2, "head_dim": 128, "n_expert": 8,
            "n_expert_used": 2, "n_ff_exp": 256, "quant": "{quant}", "vocab": {{"n_tokens": 1000}},
            "linear_attention": {{"conv_kernel": 4, "state_size": 64, "group_count": 2, "time_step_rank": 4,
            "full_attention_interval": 4}}}}"#
    );
    serde_json::from_str(&text).unwrap()
}

#[test]
fn weights_of_all_types_are_finite() {
    for ty in GgmlType::ALL.iter().map(|ty| ty.name()) {
        let synth = match Synth::new(&small(ty), SynthOptions { seed: 3, zipf: 1.0 }) {
            Ok(synth) => synth,
            Err(Error::Quant { name, .. }) => {
                assert_eq!(name, ty);
                continue;
            }
            Err(error) => panic!("{ty}: {error}"),
        };
        let bytes = synth.write(Vec::new()).unwrap();
        assert_eq!(bytes.len() as u64, synth.file_size().unwrap());
        let gguf = Gguf::from_bytes(ty, bytes).unwrap();
        let up = gguf.tensor("blk.3.ffn_up_exps.weight").unwrap();
        assert_eq!(up.ty.name(), ty);
        for verified in verify(&gguf, Algorithm::Xxh3, |_| {}).unwrap() {
            let tensor = &gguf.tensors()[verified.tensor as usize];
            assert_eq!(verified.non_finite, None, "{ty}: {}", tensor.name);
            let data = gguf.data(tensor).unwrap();
            assert!(data.iter().any(|&byte| byte != 0) || tensor.name.ends_with("gate_inp.bias"));
        }
    }
    assert!(Synth::new(&small("Q4_K"), SynthOptions::default()).is_ok());
}

#[test]
fn output_does_not_depend_on_the_number_of_threads() {
    let mut spec = small("Q4_K_M");
    spec.n_ff_exp = 1024; // Several chunks per tensor.
    let synth = Synth::new(&spec, SynthOptions { seed: 1, zipf: 0.7 }).unwrap();
    let [one, three] = [1, 3].map(|n_threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads);
        let pool = pool.build().unwrap();
        pool.install(|| synth.write(Vec::new()).unwrap())
    });
    assert!(one == three);
    let other = Synth::new(&spec, SynthOptions { seed: 2, zipf: 0.7 }).unwrap();
    assert!(one != other.write(Vec::new()).unwrap());
}

#[test]
fn reports_a_full_disk() {
    struct Full(u64);
    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 = self.0.saturating_sub(bytes.len() as u64);
            match self.0 {
                0 => Err(std::io::ErrorKind::StorageFull.into()),
                _ => Ok(bytes.len()),
            }
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let synth = Synth::new(&small("F32"), SynthOptions::default()).unwrap();
    let error = synth.write(Full(3 << 20)).err().unwrap();
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
}

/// Every description in `fixtures/architectures` is a small file and a valid model, the same for the same seed.
#[test]
fn described_models_are_valid() {
    let files = std::fs::read_dir(moe_testkit::fixture("architectures")).unwrap();
    let mut n_models = 0;
    for file in files {
        let path = file.unwrap().path();
        let json = std::fs::read(&path).unwrap();
        assert!(json.len() <= 10_000, "{path:?}");
        let description: Description = serde_json::from_slice(&json).unwrap();
        assert_eq!(path.file_stem().unwrap(), description.arch.as_str());
        for ty in [GgmlType::F32, GgmlType::F16, GgmlType::Q8_0] {
            let written = |seed| {
                let synth = Synth::described(&description, ty, seed).unwrap();
                synth.write(Vec::new()).unwrap()
            };
            let bytes = written(1);
            assert_eq!(bytes, written(1));
            assert_ne!(bytes, written(2));
            let gguf = Gguf::from_bytes("described.gguf", bytes).unwrap();
            assert!(check(&gguf).is_sound(), "{path:?}");
            n_models += 1;
        }
    }
    assert!(n_models > 0);
}

#[test]
fn descriptions_can_be_changed() {
    let json = std::fs::read(moe_testkit::fixture("architectures/glm4moe.json")).unwrap();
    let mut description: Description = serde_json::from_slice(&json).unwrap();
    description.set("rope.dimension_count", Key::Number(4));
    description.replace_tensors(&["ffn_gate.weight"], &[("ffn_other.weight", &[64, 32])]);
    let synth = Synth::described(&description, GgmlType::F32, 1).unwrap();
    let gguf = Gguf::from_bytes("changed.gguf", synth.write(Vec::new()).unwrap()).unwrap();
    let dimensions = gguf.metadata().u32("glm4moe.rope.dimension_count");
    assert_eq!(dimensions.unwrap(), Some(4));
    // Only the first layer is dense.
    for (name, ne) in [
        ("blk.0.ffn_other.weight", Some([64, 32, 1, 1])),
        ("blk.0.ffn_gate.weight", None),
        ("blk.1.ffn_other.weight", None),
    ] {
        assert_eq!(gguf.tensor(name).map(|tensor| tensor.ne), ne, "{name}");
    }
}
