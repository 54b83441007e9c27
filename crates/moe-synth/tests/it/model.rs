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
    sparse_file(&Synth::new(spec, SynthOptions::default()).unwrap())
}

#[track_caller]
fn sparse_file(synth: &Synth) -> Option<(tempfile::NamedTempFile, Gguf)> {
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
const KNOWN: [(&str, usize, u64); 7] = [
    ("gpt-oss-20b", 459, 20_914_757_184),
    ("gpt-oss-120b", 687, 116_829_156_672),
    ("qwen3-30b-a3b", 579, 30_532_122_624),
    ("qwen3-next-80b", 843, 79_674_391_296),
    ("qwen3-next-80b-a3b", 843, 79_674_391_296),
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

/// Described model, number of tensors, parameters, and layers with experts.
const DESCRIBED: [(&str, usize, u64, u64); 11] = [
    ("afmoe", 601, 26_123_974_400, 30),
    ("arctic", 493, 478_584_608_768, 35),
    ("dbrx", 323, 131_596_523_520, 40),
    ("deepseek-v2-lite", 377, 15_706_484_224, 26),
    ("gemma4-26b-a4b", 658, 25_233_142_046, 30),
    ("glm-4.5-air", 803, 110_468_824_832, 46),
    ("granite-4-h-tiny", 666, 6_939_037_248, 40),
    ("lfm2-8b-a1b", 256, 8_339_930_560, 22),
    ("minimax-m2", 809, 228_689_764_864, 62),
    ("nemotron-3-nano-30b-a3b", 401, 31_577_940_288, 23),
    ("qwen35moe-35b-a3b", 733, 34_660_610_688, 40),
];

#[test]
fn described_presets_have_published_numbers_of_tensors_and_parameters() {
    assert!(Description::presets().eq(DESCRIBED.iter().map(|known| known.0)));
    for (name, n_tensors, parameters, n_moe) in DESCRIBED {
        let description = Description::like(name).unwrap();
        let synth = Synth::of_description(&description, SynthOptions::default()).unwrap();
        let Some((_file, gguf)) = sparse_file(&synth) else {
            return;
        };
        assert_eq!(gguf.tensors().len(), n_tensors, "{name}");
        assert_eq!(n_parameters(&gguf), parameters, "{name}");
        let report = check(&gguf);
        assert!(
            report.is_sound() && report.llama_cpp_refuses.is_empty(),
            "{name}"
        );
        let is_down = |t: &&moe_gguf::Tensor| t.name.ends_with(".ffn_down_exps.weight");
        let n_down = gguf.tensors().iter().filter(is_down).count() as u64;
        assert_eq!(n_down, n_moe, "{name}");
        let quantized = gguf.tensors().iter().any(|t| t.ty == GgmlType::Q4_K);
        assert!(quantized, "{name}");
    }
}

#[test]
fn described_models_can_be_cut() {
    let glm = || Description::like("glm-4.5-air").unwrap();
    let cut = glm().with_layers(46).unwrap();
    assert_eq!(cut.keys["block_count"], Key::Number(46));
    assert!(!cut.keys.contains_key("nextn_predict_layers"));
    assert!(
        glm()
            .with_layers(47)
            .unwrap()
            .keys
            .contains_key("nextn_predict_layers")
    );
    for (n, problem) in [
        (0, "0 is out of range (1..=47)"),
        (48, "48 is out of range (1..=47)"),
        (
            1,
            "1 is out of range (2..=47); the first layer with experts is 1",
        ),
    ] {
        let error = glm().with_layers(n).err().unwrap();
        assert!(error.to_string().contains(problem), "{error}");
    }
    let granite = Description::like("granite-4-h-tiny").unwrap();
    let cut = granite.with_layers(7).unwrap();
    let heads = Key::Numbers(vec![0, 0, 0, 0, 0, 4, 0]);
    assert_eq!(cut.keys["attention.head_count_kv"], heads);
    let synth = Synth::of_description(&cut, SynthOptions::default()).unwrap();
    // One of 7 layers has attention (13 tensors), the others Mamba-2 (17 tensors).
    assert_eq!(synth.tensors().len(), 2 + 6 * 17 + 13);
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

/// Descriptions have models of all types that fit their rows, and their weights are finite.
#[test]
fn described_models_have_the_types_of_a_mix() {
    let json = std::fs::read(moe_testkit::fixture("architectures/gemma4.json")).unwrap();
    let mut description: Description = serde_json::from_slice(&json).unwrap();
    let options = SynthOptions { seed: 1, zipf: 1.0 };
    for (quant, experts, others) in [
        ("F32", GgmlType::F32, GgmlType::F32),
        ("F16", GgmlType::F16, GgmlType::F16),
        ("Q8_0", GgmlType::Q8_0, GgmlType::Q8_0),
        ("MXFP4_MOE", GgmlType::MXFP4, GgmlType::Q8_0),
        ("MXFP4", GgmlType::MXFP4, GgmlType::F16),
    ] {
        description.quant = quant.to_owned();
        let synth = Synth::of_description(&description, options).unwrap();
        let gguf = Gguf::from_bytes(quant, synth.write(Vec::new()).unwrap()).unwrap();
        assert!(check(&gguf).is_sound(), "{quant}");
        let ty = |name: &str| gguf.tensor(name).unwrap().ty;
        assert_eq!(ty("blk.1.ffn_up_exps.weight"), experts, "{quant}");
        assert_eq!(ty("blk.3.attn_output.weight"), others, "{quant}");
        assert_eq!(ty("blk.1.ffn_gate_inp.weight"), GgmlType::F32, "{quant}");
        for verified in verify(&gguf, Algorithm::Xxh3, |_| {}).unwrap() {
            let tensor = &gguf.tensors()[verified.tensor as usize];
            assert_eq!(verified.non_finite, None, "{quant}: {}", tensor.name);
        }
    }
    for (quant, problem) in [
        (
            "Q4_K_M",
            "`quant` is invalid: Q4_K has blocks of 256 elements",
        ),
        ("Q9_X", "weight type `Q9_X` is not supported"),
    ] {
        description.quant = quant.to_owned();
        let error = Synth::of_description(&description, options).err().unwrap();
        assert!(error.to_string().contains(problem), "{error}");
    }
}

/// A description has a valid model of every type, or an error that names the size of its blocks.
#[test]
fn described_models_have_all_types_that_fit() {
    let files = std::fs::read_dir(moe_testkit::fixture("architectures")).unwrap();
    for file in files {
        let path = file.unwrap().path();
        let json = std::fs::read(&path).unwrap();
        let mut description: Description = serde_json::from_slice(&json).unwrap();
        let types = GgmlType::ALL.iter().map(|ty| ty.name());
        let mut n_models = 0;
        for quant in types.chain(["Q4_K_M", "Q5_K_M", "MXFP4_MOE"]) {
            description.quant = quant.to_owned();
            match Synth::of_description(&description, SynthOptions::default()) {
                Ok(synth) => {
                    let bytes = synth.write(Vec::new()).unwrap();
                    let gguf = Gguf::from_bytes(quant, bytes).unwrap();
                    assert!(check(&gguf).is_sound(), "{path:?}, {quant}");
                    n_models += 1;
                }
                Err(Error::Spec { key, problem }) => {
                    assert_eq!(key, "quant", "{path:?}, {quant}: {problem}");
                    assert!(
                        problem.contains("blocks of"),
                        "{path:?}, {quant}: {problem}"
                    );
                }
                Err(Error::Quant { .. }) => {}
                Err(error) => panic!("{path:?}, {quant}: {error}"),
            }
        }
        // At least F32, F16, BF16, and seven types with blocks of 32 elements.
        assert!(n_models >= 10, "{path:?}: {n_models}");
    }
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
