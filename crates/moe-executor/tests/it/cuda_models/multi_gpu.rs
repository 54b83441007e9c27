//! Lists of several GPUs. All tests but one use a single GPU that is listed more than once.

use std::collections::BTreeMap;

use moe_executor::Model;
use moe_executor::cuda::{Gpu, GpuSpec, Policy};
use moe_testkit::{Need, Report, skip};
use moe_trace::buffers::Change;
use moe_trace::record::SOURCE_BUFFER;

use super::recording::record;
use super::{Case, Entry, MODELS, ONCE, TWICE, case, has_gpu, open};
use crate::reference::{ModelRun, reference, run};

/// GPU 0, listed three times.
const THRICE: &[Entry] = &[(0, None), (0, None), (0, None)];

/// The bits of the logits, router logits and ids of the selected experts.
fn bits(ran: &ModelRun) -> Vec<u32> {
    let routed = ran.routed.iter().flatten();
    let routed = routed.flat_map(|token| {
        let ids = token.ids.iter().map(|&id| id as u32);
        ids.chain(token.logits.iter().map(|x| x.to_bits()))
    });
    let logits = ran.logits.iter().flatten().map(|x| x.to_bits());
    routed.chain(logits).collect()
}

/// Requires that all cases compute the same bits as the first case.
fn require_equal_results(report: &mut Report, cases: &[Case]) {
    for (name, _) in MODELS {
        let gguf = open(name);
        let model = Model::load(&gguf).unwrap();
        let reference = reference(&format!("{name}.python"));
        let mut first = None;
        for case in cases {
            let ran = run(
                &model,
                &reference,
                512,
                (&|gguf, model| case.open(gguf, model), &|session| {
                    case.prepare(session)
                }),
                &|_| None,
            );
            let bits = bits(&ran);
            let same = *first.get_or_insert_with(|| bits.clone()) == bits;
            println!("{name}, {} values, equal: {same}; {case:?}", bits.len());
            if !same {
                report.fail(format!("{name}: different values with {case:?}"));
            }
        }
    }
}

/// Lists of GPUs with the proportions of the layers on them.
const SPLITS: [(&[Entry], &[f32]); 6] = [
    (ONCE, &[]),
    (TWICE, &[]),
    (TWICE, &[1.0, 3.0]),
    (TWICE, &[0.0, 1.0]),
    (THRICE, &[]),
    (THRICE, &[2.0, 1.0, 2.0]),
];

#[test]
fn split_layers_compute_the_same() {
    if !has_gpu() {
        return;
    }
    let mut report = Report::default();
    for policy in [Policy::Gpu, Policy::Cpu, Policy::PostFetch] {
        for n_gpu_layers in [usize::MAX, 2] {
            let cases = SPLITS.map(|(gpus, split)| Case {
                gpus,
                split,
                n_gpu_layers,
                ..case(policy)
            });
            require_equal_results(&mut report, &cases);
        }
    }
    report.finish();
}

/// Selected experts are copied on demand to the GPU of their layer.
#[test]
fn experts_copied_on_demand_compute_the_same_on_several_gpus() {
    if !has_gpu() {
        return;
    }
    let mut report = Report::default();
    let cases = SPLITS.map(|(gpus, split)| Case {
        gpus,
        split,
        n_cpu_moe: usize::MAX,
        min_batch: Some(1),
        ..case(Policy::Gpu)
    });
    require_equal_results(&mut report, &cases);
    report.finish();
}

/// Overrides place tensors on a GPU other than that of their layer. Inputs are copied to that GPU, results are copied back.
#[test]
fn tensors_on_another_gpu_match_llama_cpp() {
    const PARTS: [&[&str]; 6] = [
        &["_exps=CUDA1"],
        &["blk.[13].ffn_.*_exps=CUDA1"],
        // Gate and up are on one GPU, down is on the other.
        &["ffn_(gate|up)_exps=CUDA1"],
        &["ffn_down_exps=CUDA1"],
        &["attn_(q|v|output)=CUDA1", "ffn_gate_inp=CUDA1"],
        &[
            "attn_k=CUDA1",
            "ffn_up_exps=CPU",
            "shexp=CUDA1",
            "output.weight=CUDA1",
        ],
    ];
    for overrides in PARTS {
        let parts = Case {
            gpus: TWICE,
            split: &[1.0, 0.0],
            overrides,
            min_batch: None,
            ..case(Policy::Gpu)
        };
        parts.compare(&MODELS, &["python", "long"]);
    }
}

/// Each buffer that a source refers to must have an `alloc` event, and sources must be on all devices.
#[test]
fn sources_refer_to_allocated_buffers_of_each_device() {
    if !has_gpu() {
        return;
    }
    let mut report = Report::default();
    for (name, _) in MODELS {
        let twice = Case {
            gpus: TWICE,
            ..case(Policy::Gpu)
        };
        let recorded = record(&open(name), Some(&twice), false);
        let mut backends = BTreeMap::new();
        for event in &recorded.buffers {
            if let Change::Alloc(buffer) = &event.change {
                backends.insert(buffer.buffer_id, buffer.backend.as_str());
            }
        }
        // Number of sources by device.
        let mut n_sources = BTreeMap::new();
        for record in &recorded.records {
            let sources = record.sources().iter();
            for source in sources.filter(|source| source.memory_source == SOURCE_BUFFER) {
                let id = source.offset_or_buffer_id.get();
                let backend = backends.get(&id).copied();
                *n_sources.entry(backend).or_insert(0) += 1;
                if backend.is_none() && source.name() != "attn_inp_kq_mask" {
                    report.fail(format!(
                        "{name}: {} refers to buffer {id}, which has no alloc event",
                        source.name()
                    ));
                }
            }
        }
        println!("{name}: sources by device {n_sources:?}");
        let missing = ["CPU", "CUDA0", "CUDA1"]
            .into_iter()
            .find(|device| !n_sources.contains_key(&Some(*device)));
        if let Some(device) = missing {
            report.fail(format!("{name}: no source on {device}"));
        }
        if !recorded.faults.is_empty() {
            report.fail(format!("{name}: {:?}", recorded.faults));
        }
    }
    report.finish();
}

#[test]
fn rejects_gpu_that_does_not_exist() {
    if !has_gpu() {
        return;
    }
    let spec = GpuSpec {
        ordinal: 1 << 20,
        limit: None,
    };
    let error = Gpu::open_all(&[GpuSpec::default(), spec]).err().unwrap();
    assert!(
        error.to_string().starts_with("there is no GPU 1048576: "),
        "{error}"
    );
}

#[test]
fn two_physical_gpus_compute_the_same() {
    const BOTH: &[Entry] = &[(0, None), (1, None)];
    let spec = GpuSpec {
        ordinal: 1,
        limit: None,
    };
    if let Err(missing) = Gpu::open_all(&[spec]) {
        return skip(Need::TwoGpus, missing);
    }
    let mut report = Report::default();
    for policy in [Policy::Gpu, Policy::Cpu, Policy::PostFetch] {
        let both = [(ONCE, [].as_slice()), (BOTH, &[]), (BOTH, &[1.0, 3.0])];
        let cases = both.map(|(gpus, split)| Case {
            gpus,
            split,
            ..case(policy)
        });
        require_equal_results(&mut report, &cases);
    }
    report.finish();
}
