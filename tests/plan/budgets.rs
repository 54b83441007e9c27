//! Budgets: given, automatic, and read from a GPU.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::{QWEN, workplace, write};
use crate::support::{args, moe_analyze, repository, run};

#[test]
fn plans_with_every_kind_of_budget() {
    let dir = workplace();
    let (learn, model) = (dir.path().join("learn.json"), repository(QWEN));
    let lanes = |more: &[&str], path: Option<&Path>| {
        let mut command = moe_analyze();
        if let Some(path) = path {
            command.env("PATH", path);
        }
        command
            .args(args!["--quiet", "plan", learn, "--model", model, "-o", "json"])
            .args(more);
        let output = command.output().unwrap();
        let plan: Value = serde_json::from_slice(&output.stdout).ok()?;
        let lanes = plan["lanes"].as_array().unwrap().iter();
        Some(
            lanes
                .map(|lane| lane["budget_bytes"].as_u64().unwrap())
                .collect::<Vec<_>>(),
        )
    };
    let mib = 1 << 20;
    assert_eq!(lanes(&["--budget-mib", "1,3"], None).unwrap(), [mib, 3 * mib]);
    // The published example, and the reserve of a further lane.
    let auto = [
        "--budget-mib", "auto,-1", "--free-mib", "4096.5,600", "--kv-mib", "1024,0",
        "--reserve-mib", "512",
    ];
    assert_eq!(lanes(&auto, None).unwrap(), [2560 * mib, 88 * mib]);
    let loaded = ["--budget-mib", "auto", "--free-mib", "1025", "--kv-mib", "0"];
    assert_eq!(lanes(&loaded, None).unwrap(), [mib]);

    let help = run!["plan", "--help"];
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.contains("auto (or -1, as in the fork) uses the free memory of the GPU, minus the memory of the model"), "{help}");

    let nowhere = dir.path().join("nowhere");
    assert_eq!(lanes(&["--budget-mib", "auto"], Some(&nowhere)), None);
    let error = moe_analyze()
        .env("PATH", &nowhere)
        .args(args!["plan", learn, "--model", model, "--budget-mib", "auto"])
        .assert()
        .code(2);
    let error = String::from_utf8_lossy(&error.get_output().stderr).into_owned();
    assert!(error.contains("--free-mib") && error.lines().count() == 1, "{error}");
}

/// Uses nvidia-smi on a machine with a GPU.
#[cfg(unix)]
#[test]
fn reads_free_memory_of_the_gpu() {
    use std::os::unix::fs::PermissionsExt as _;

    let dir = workplace();
    let tool = write(&dir, "nvidia-smi", "#!/bin/sh\necho 2050\necho 3000\n");
    fs::set_permissions(&tool, fs::Permissions::from_mode(0o755)).unwrap();
    let (learn, model) = (dir.path().join("learn.json"), repository(QWEN));
    let output = moe_analyze()
        .env("PATH", dir.path())
        .args(args![
            "plan", learn, "--model", model, "--budget-mib", "auto,auto", "--kv-mib", "0,0", "-o",
            "json"
        ])
        .output()
        .unwrap();
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(plan["lanes"][0]["budget_bytes"], (2050 - 1024) << 20);
    assert_eq!(plan["lanes"][1]["budget_bytes"], (3000u64 - 512) << 20);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        stderr.contains("lane 0: budget 1026 MiB (2050 MiB free - 0 MiB model and context - "),
        "{stderr}"
    );
}
