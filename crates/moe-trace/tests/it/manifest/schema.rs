//! The keys of a manifest and `schemas/run.schema.json`.

use std::collections::BTreeSet;
use std::fs;

use moe_trace::dynamic_cache::{Counts, DynamicCache, Failures, Prefetch};
use moe_trace::hot_cache::{HotCache, HotFailures, HotLane, HotRequest};
use moe_trace::manifest::{
    Adapter, ChatTemplate, Engine, Fallbacks, Gpu, Host, KvCache, Manifest, Model, ModelFile,
    PostFetch, Sampling, Sequence, Tokens,
};
use moe_trace::ops::default_table;
use moe_trace::{ExpertId, LayerId};
use serde_json::{Map, Value};

fn schema() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../schemas/run.schema.json");
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn hot_cache() -> HotCache {
    HotCache {
        source: "learn.json".into(),
        kind: "learn".into(),
        strategy: "warm".into(),
        weighting: "flat".into(),
        layer_curve: 0.5,
        fill_random: false,
        lanes: vec![HotLane {
            device: "CUDA0".into(),
            budget_bytes: 1 << 20,
            planned_bytes: 300,
            bytes: 300,
            experts: [(LayerId(2), vec![ExpertId(3)])].into(),
        }],
        perf: "update".into(),
        update_policy: "fork".into(),
        update_rate: 0.1,
        update_after: "request".into(),
        requests: vec![HotRequest {
            hot_slots: 3,
            cold_slots: 1,
            exchanged: 0,
        }],
        failures: Some(HotFailures {
            layers: 0,
            calls: 1,
            exchanges: 0,
            first_error: Some("out of memory".into()),
        }),
    }
}

fn dynamic_cache() -> DynamicCache {
    DynamicCache {
        policy: "layerlfu".into(),
        predictor: Some("markov".into()),
        depth: 1,
        n_predict: Some(4),
        device: "CPU".into(),
        budget_bytes: 1 << 20,
        n_slots: 3,
        n_prefetch_slots: 1,
        bytes: 1 << 20,
        perf: "off".into(),
        counts: Some(Counts {
            look_ups: [5, 6],
            hits: [1, 2],
            missed_bytes: [40, 40],
            evictions: 3,
            without_slot: 1,
            prefetch: Some(Prefetch {
                timely: 1,
                late: 1,
                missed: 2,
                wasted: 0,
                predicted: 4,
                correct: 2,
                moved_bytes: 80,
            }),
        }),
        failures: Some(Failures {
            layers: 0,
            calls: 0,
            copies: 1,
            first_error: Some("out of memory".into()),
        }),
    }
}

fn gpu() -> Gpu {
    Gpu {
        device: Some("CUDA0".into()),
        ordinal: Some(0),
        name: "GPU".into(),
        memory_bytes: 1 << 34,
        driver: Some("560.35".into()),
        limit_bytes: Some(1 << 32),
        peak_bytes: Some(1 << 31),
        scratchpad_bytes: Some(1 << 20),
        fallbacks: Some(Fallbacks {
            operations: 3,
            tensors: 1,
            first_error: Some("out of memory".into()),
        }),
        offload_min_batch: Some(32),
        post_fetch: Some(PostFetch {
            enable: true,
            force_cpu: false,
            block_on_miss: true,
            max_transfers: 8,
            scratchpad_mb: 0,
            use_dedicated_streams: true,
            cpu_limit: 0,
        }),
    }
}

/// A manifest with all optional values. It names every field, so that a new field does not compile here until it has a value.
fn full() -> Manifest {
    Manifest {
        schema: moe_trace::manifest::SCHEMA.into(),
        run_id: "20260701T123456Z-00c0ffee".into(),
        engine: Engine {
            name: "moe-analyze".into(),
            version: "0.1.0".into(),
        },
        command: vec!["moe-analyze".into(), "record".into()],
        model: Model {
            path: "model.gguf".into(),
            files: vec![ModelFile {
                name: "model.gguf".into(),
                size_bytes: 642_048,
            }],
            header_xxh3: "0123456789abcdef".into(),
            xxh3: Some("fedcba9876543210".into()),
            arch: "gpt-oss".into(),
            n_layer: 5,
            n_nextn_layer: 1,
            n_expert: 16,
            n_expert_used: 4,
            expert_types: vec!["F16".into()],
        },
        adapters: vec![Adapter {
            path: "adapter.gguf".into(),
            scale: 0.5,
            header_xxh3: "0123456789abcdef".into(),
        }],
        record_format: moe_trace::manifest::RECORD_FORMAT.into(),
        records: Some(0),
        expansion: Some(moe_trace::Expansion {
            bytes: 1_048_576,
            seconds: 0.001,
        }),
        stopped: Some("interrupted".into()),
        replacing: true,
        ops: default_table().clone(),
        tokens: Tokens {
            prompt: 6,
            generated: 64,
            sequences: 1,
        },
        sequences: vec![Sequence {
            prompt: 6,
            generated: 64,
            stopped: "limit".into(),
        }],
        sampling: Sampling {
            method: "random".into(),
            seed: Some(3),
            // Keys of any name.
            parameters: Map::new(),
        },
        chat_template: Some(ChatTemplate {
            origin: "model".into(),
            xxh3: "0123456789abcdef".into(),
        }),
        policy: "hot-cache".into(),
        hot_cache: Some(hot_cache()),
        dynamic_cache: Some(dynamic_cache()),
        n_threads: 2,
        kv_cache: Some(KvCache {
            type_k: "f16".into(),
            type_v: "f16".into(),
            n_seq: Some(1),
            n_positions: Some(70),
            size_bytes: Some(1 << 16),
            state_bytes: Some(1 << 12),
        }),
        host: Host {
            cpu: "CPU".into(),
            ram_bytes: 1 << 36,
            os: "linux".into(),
        },
        gpu: Some(gpu()),
        gpus: vec![gpu()],
        mmap: vec!["MAP_SHARED".into()],
        started: "2026-07-01T12:34:56Z".into(),
        clock: "monotonic".into(),
        prompts: Some(vec!["The".into()]),
        token_ids: Some(vec![vec![464, 5]]),
        extra: Map::new(),
    }
}

/// Follows `$ref`, and selects the first alternative of `anyOf`.
fn resolved<'a>(root: &'a Value, schema: &'a Value) -> &'a Value {
    let first = |alternatives: &'a Value| &alternatives[0];
    let schema = schema.get("anyOf").map_or(schema, first);
    match schema.get("$ref").and_then(Value::as_str) {
        Some(target) => root.pointer(target.trim_start_matches('#')).unwrap(),
        None => schema,
    }
}

/// Asserts that the schema describes each key of a value.
fn assert_described(root: &Value, schema: &Value, value: &Value, at: &str) {
    let schema = resolved(root, schema);
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                let at = format!("{at}/{key}");
                let property = schema["properties"].get(key);
                let property = property.or(schema.get("additionalProperties"));
                let property = property.unwrap_or_else(|| panic!("the schema lacks {at}"));
                assert_described(root, property, value, &at);
            }
        }
        Value::Array(items) => {
            for item in items {
                assert_described(root, &schema["items"], item, at);
            }
        }
        _ => {}
    }
}

/// Adds JSON pointers to the required keys of a schema, recursively. For an object with required keys, only these are added.
fn required(root: &Value, schema: &Value, at: &str, pointers: &mut BTreeSet<String>) {
    let Some(keys) = schema["required"].as_array() else {
        pointers.insert(at.to_owned());
        return;
    };
    for key in keys.iter().map(|key| key.as_str().unwrap()) {
        let property = &schema["properties"][key];
        // A required key whose value may be null, such as `gpu`, has no required keys.
        let property = match property.get("anyOf") {
            Some(_) => property,
            None => resolved(root, property),
        };
        required(root, property, &format!("{at}/{key}"), pointers);
    }
}

#[test]
fn schema_describes_all_keys() {
    let schema = schema();
    let value = serde_json::to_value(full()).unwrap();
    assert_described(&schema, &schema, &value, "");
    let validator = jsonschema::validator_for(&schema).unwrap();
    let faults: Vec<String> = validator
        .iter_errors(&value)
        .map(|error| error.to_string())
        .collect();
    assert!(faults.is_empty(), "{faults:?}");
}

#[test]
fn missing_keys_are_the_required_keys_of_the_schema() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("manifest.json");
    fs::write(&path, "{}").unwrap();
    let missing = Manifest::missing_keys(&path).unwrap();
    let missing: BTreeSet<String> = missing.into_iter().map(str::to_owned).collect();
    let (schema, mut expected) = (schema(), BTreeSet::new());
    required(&schema, &schema, "", &mut expected);
    assert_eq!(missing, expected);
}
