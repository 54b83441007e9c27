//! `manifest.json` of a run.

mod schema;

use std::fs;

use moe_trace::hot_cache::{HotCache, HotFailures, HotLane, HotRequest};
use moe_trace::{Error, ExpertId, LayerId, Manifest, ManifestFault, RunOptions, RunWriter};

use super::common::{gpt_oss, manifest};

fn hot_cache() -> HotCache {
    let experts = |ids: &[u32]| ids.iter().copied().map(ExpertId).collect();
    HotCache {
        source: "learn.json".into(),
        kind: "learn".into(),
        strategy: "warm".into(),
        weighting: "flat".into(),
        layer_curve: 0.5,
        lanes: vec![HotLane {
            device: "CUDA0".into(),
            budget_bytes: 1 << 20,
            planned_bytes: 300,
            bytes: 300,
            experts: [(LayerId(2), experts(&[3])), (LayerId(11), experts(&[0, 7]))].into(),
        }],
        perf: "update".into(),
        update_policy: "fork".into(),
        update_after: "request".into(),
        ..HotCache::default()
    }
}

#[test]
fn manifest_conforms_to_its_schema() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let schema = fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../schemas/run.schema.json"
    ))
    .unwrap();
    let schema = jsonschema::validator_for(&serde_json::from_str(&schema).unwrap()).unwrap();
    let check = |dir: &std::path::Path| {
        let json: serde_json::Value =
            serde_json::from_slice(&fs::read(dir.join("manifest.json")).unwrap()).unwrap();
        let faults: Vec<_> = schema
            .iter_errors(&json)
            .map(|error| error.to_string())
            .collect();
        assert!(faults.is_empty(), "{faults:?}");
        json
    };
    let mut full = manifest();
    let gpu = moe_trace::manifest::Gpu {
        device: Some("CUDA0".into()),
        ordinal: Some(0),
        name: "GPU".into(),
        memory_bytes: 1 << 34,
        driver: None,
        limit_bytes: Some(1 << 32),
        peak_bytes: Some(1 << 31),
        scratchpad_bytes: Some(1 << 20),
        fallbacks: Some(moe_trace::manifest::Fallbacks {
            operations: 3,
            tensors: 1,
            first_error: Some("out of memory".into()),
        }),
        offload_min_batch: Some(32),
        post_fetch: Some(moe_trace::manifest::PostFetch {
            enable: true,
            max_transfers: 8,
            ..Default::default()
        }),
    };
    let second = moe_trace::manifest::Gpu {
        device: Some("CUDA1".into()),
        ..gpu.clone()
    };
    full.set_gpus(vec![gpu, second]);
    full.sampling.seed = Some(3);
    full.sampling
        .parameters
        .insert("temperature".into(), 0.8.into());
    full.prompts = Some(vec!["The".into()]);
    full.hot_cache = Some(hot_cache());
    let dir = tmp.path().join("run");
    let mut writer = RunWriter::create(&dir, full, &map, RunOptions::default()).unwrap();
    let json = check(&dir);
    assert_eq!(json["hot_cache"]["lanes"][0]["experts"]["11"][1], 7);
    assert_eq!(json["hot_cache"].get("failures"), None);
    let started = Manifest::of_run(&dir).unwrap().unwrap();
    assert_eq!(started.hot_cache, Some(hot_cache()));
    let hot = writer.manifest_mut().hot_cache.as_mut().unwrap();
    hot.requests.push(HotRequest::default());
    hot.failures = Some(HotFailures {
        first_error: Some("out of memory".into()),
        ..Default::default()
    });
    assert_eq!(json.get("records"), None);
    assert_eq!(json["ops"]["30"], "MUL_MAT_ID");
    assert_eq!(json["sampling"]["temperature"], 0.8);
    assert_eq!(json["gpu"]["limit_bytes"], 1u64 << 32);
    assert_eq!(json["gpus"][0], json["gpu"]);
    assert_eq!(json["gpus"][1]["device"], "CUDA1");
    writer.finish().unwrap();
    assert_eq!(check(&dir)["records"], 0);

    let mut wrong = json.clone();
    wrong["model"]["files"][0]["size_bytes"] = (-1).into();
    assert!(!schema.is_valid(&wrong));
    let mut wrong = json.clone();
    wrong["gpu"]["peak_bytes"] = "2 GiB".into();
    assert!(!schema.is_valid(&wrong));
}

#[test]
fn keeps_unknown_keys() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("manifest.json");
    fs::write(
        &path,
        r#"{"schema":"moe-analyze.run.v1","later":{"a":[1]}}"#,
    )
    .unwrap();
    Manifest::read(&path).unwrap().write(&path).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(json["later"]["a"][0], 1);

    // Unknown keys of nested objects are ignored.
    fs::write(
        &path,
        r#"{"schema":"moe-analyze.run.v1","model":{"arch":"olmoe","later":1},"host":{"later":{}}}"#,
    )
    .unwrap();
    assert_eq!(Manifest::read(&path).unwrap().model.arch, "olmoe");

    fs::write(&path, r#"{"schema":"moe-analyze.run.v9"}"#).unwrap();
    let error = Manifest::read(&path).unwrap_err();
    assert!(
        matches!(&error, Error::Manifest { path: at, fault: ManifestFault::Schema { found } }
            if *at == path && found == "moe-analyze.run.v9"),
        "{error:?}"
    );
}

#[test]
fn accepts_a_byte_order_mark() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("manifest.json");
    let written = manifest();
    written.write(&path).unwrap();
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, format!("\u{feff}{text}")).unwrap();
    assert_eq!(Manifest::read(&path).unwrap(), written);
    assert_eq!(Manifest::missing_keys(&path).unwrap(), Vec::<&str>::new());
}
