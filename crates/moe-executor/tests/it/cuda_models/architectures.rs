//! Models of the architectures in `fixtures/architectures` on a GPU, compared with the CPU.

use moe_executor::cuda::Policy;
use moe_executor::{DeviceId, Model};
use moe_gguf::{GgmlType, Gguf};
use moe_placement::cache::{OnlinePolicy, PolicyName};
use moe_synth::model::{Description, Key};
use moe_testkit::Report;

use super::{Case, Dynamic, RandomLanes, case, has_gpu};
use crate::records::described;
use crate::reference::{ModelRun, Open, Prepare, Reference, as_is, host, run};

/// Tokens of the prompt and after it.
const N_TOKENS: usize = 70;
const N_GENERATED: usize = 24;

fn reference(n_vocab: usize) -> Reference {
    let token = |i: usize| (7 * i + i * i) as u32 % (n_vocab as u32 - 10) + 5;
    Reference {
        prompt: String::new(),
        prompt_tokens: (0..N_TOKENS).map(token).collect(),
        generated_tokens: (N_TOKENS..N_TOKENS + N_GENERATED).map(token).collect(),
        text: String::new(),
        top5_logits_per_generated_position: Vec::new(),
        expert_ids_by_layer: Vec::new(),
        overrides: Default::default(),
        tensors: Default::default(),
    }
}

/// A model whose router selects experts from two of four groups.
fn with_expert_groups() -> Description {
    let mut description = described::description("glm4moe");
    description.set("expert_group_count", Key::Number(4));
    description.set("expert_group_used_count", Key::Number(2));
    description
}

/// How a run on a GPU differs from that on the CPU, if it is outside the bounds of F16 models.
fn outside(cpu: &ModelRun, gpu: &ModelRun) -> Option<String> {
    let best = |row: &[f32]| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]));
    let pairs = || cpu.logits.iter().zip(&gpu.logits);
    let other_top1 = pairs().filter(|(a, b)| best(a) != best(b)).count();
    let mut difference = 0.0;
    for (a, b) in pairs() {
        let mut order: Vec<usize> = (0..a.len()).collect();
        order.sort_by(|&i, &j| a[j].total_cmp(&a[i]));
        difference += order[..5]
            .iter()
            .map(|&i| f64::from((a[i] - b[i]).abs()))
            .sum::<f64>();
    }
    let difference = difference / (5 * cpu.logits.len()) as f64;
    let sorted = |ids: &[i32]| {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids
    };
    let rows = cpu.routed.iter().flatten().zip(gpu.routed.iter().flatten());
    let (mut n, mut other) = (0, 0);
    for (a, b) in rows {
        n += 1;
        other += usize::from(sorted(&a.ids) != sorted(&b.ids));
    }
    let same_rows = cpu.routed.iter().flatten().count() == gpu.routed.iter().flatten().count();
    let is_within = other_top1 == 0 && difference <= 0.02 && 100 * other <= n && same_rows;
    (!is_within).then(|| {
        format!(
            "{other_top1} of {} other best tokens, mean difference of the top five logits {difference:.5}, {other} of {n} other \
             sets of experts, {:?}",
            cpu.logits.len(),
            gpu.wrong
        )
    })
}

#[test]
fn described_models_agree_with_the_cpu() {
    if !has_gpu() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut report = Report::default();
    let mut paths = described::models(dir.path());
    paths.extend(described::write(dir.path(), [with_expert_groups()]));
    assert!(paths.len() >= 30, "{} models", paths.len());
    for path in paths {
        let gguf = Gguf::open(&path).unwrap();
        let model = Model::load(&gguf).unwrap();
        let name = path.file_stem().unwrap().to_str().unwrap();
        let reference = reference(model.hparams().n_vocab);
        let on_cpu: (Open, Prepare) = (&host, &as_is);
        let expected = run(&model, &reference, 64, on_cpu, &|_| None);
        let cpu_moe = |policy| Case {
            n_cpu_moe: usize::MAX,
            ..case(policy)
        };
        let cases = [
            case(Policy::Gpu),
            cpu_moe(Policy::Cpu),
            cpu_moe(Policy::Gpu),
            cpu_moe(Policy::PostFetch),
        ];
        for case in cases {
            for batch in [1, 7, 64] {
                let open: Open = &|gguf, model| case.open(gguf, model);
                let prepare: Prepare = &|session| case.prepare(session);
                let fell_back = |devices: &moe_executor::Devices| {
                    let n: u64 = devices.gpus().iter().map(|gpu| gpu.fallbacks.ops).sum();
                    (n > 0).then(|| format!("{n} operations fell back to the CPU"))
                };
                let actual = run(&model, &reference, batch, (open, prepare), &fell_back);
                if let Some(wrong) = outside(&expected, &actual).or(actual.wrong) {
                    report.fail(format!("{name}, batches of {batch}: {wrong}; {case:?}"));
                }
            }
        }
        // Shows how far a run came that did not end in time.
        println!("{name} compared");
    }
    report.finish();
}

/// Factors, limits and activations of experts, weights on their inputs, and `ffn_gate_up_exps`, in a hot or dynamic cache on a GPU.
#[test]
fn caches_of_described_models_agree_with_the_cpu() {
    if !has_gpu() {
        return;
    }
    let mut report = Report::default();
    let hot = |percent| Case {
        hot: Some(RandomLanes {
            devices: &[DeviceId::Gpu(0)],
            percent,
        }),
        ..case(Policy::Cpu)
    };
    let dynamic = Case {
        dynamic: Some(Dynamic {
            percent: 60,
            policy: PolicyName::Shared(OnlinePolicy::Lru),
            predictor: None,
        }),
        ..case(Policy::Cpu)
    };
    for arch in ["cohere2moe", "gemma4", "llama4", "smallthinker", "step35"] {
        let gguf = described::model(&described::description(arch), GgmlType::F16);
        let model = Model::load(&gguf).unwrap();
        let reference = reference(model.hparams().n_vocab);
        let on_cpu: (Open, Prepare) = (&host, &as_is);
        let expected = run(&model, &reference, 64, on_cpu, &|_| None);
        for case in [hot(40), hot(100), dynamic] {
            for batch in [1, 7, 64] {
                let open: Open = &|gguf, model| case.open(gguf, model);
                let prepare: Prepare = &|session| case.prepare(session);
                let actual = run(&model, &reference, batch, (open, prepare), &|_| None);
                if let Some(wrong) = outside(&expected, &actual) {
                    report.fail(format!("{arch}, batches of {batch}: {wrong}; {case:?}"));
                }
            }
        }
    }
    report.finish();
}
