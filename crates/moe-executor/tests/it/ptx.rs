//! The embedded PTX is that of the kernels' sources.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// The file and those that it includes, in the order in which they are first included.
fn sources(path: PathBuf, seen: &mut Vec<PathBuf>) {
    if seen.contains(&path) {
        return;
    }
    let text = fs::read_to_string(&path).unwrap();
    seen.push(path.clone());
    for line in text.lines() {
        let included = line.strip_prefix("#include \"");
        if let Some(name) = included.and_then(|rest| rest.strip_suffix('"')) {
            sources(path.with_file_name(name), seen);
        }
    }
}

/// The compiled source files: name, hash of the sources, and the PTX for all architectures.
fn modules() -> Vec<(String, String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda/ptx");
    let mut modules = Vec::new();
    for file in fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let file = path.file_name().unwrap().to_str().unwrap().to_owned();
        let text = zstd::decode_all(fs::File::open(&path).unwrap()).unwrap();
        let text = String::from_utf8(text).unwrap();
        for module in text.split("// module ").skip(1) {
            let (header, ptx) = module.split_once('\n').unwrap();
            let (name, hash) = header.split_once(", sources: sha256 ").unwrap();
            let family = name.split('_').next().unwrap();
            assert_eq!(file, format!("{family}.ptx.zst"), "{name}");
            modules.push((name.to_owned(), hash.to_owned(), ptx.to_owned()));
        }
    }
    assert!(!modules.is_empty());
    modules
}

#[test]
fn ptx_is_as_new_as_its_source() {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda/kernels");
    let mut expected = BTreeMap::new();
    for kernel in fs::read_dir(kernels).unwrap() {
        let kernel = kernel.unwrap().path();
        if kernel.extension().is_none_or(|e| e != "cu") {
            continue;
        }
        let mut files = Vec::new();
        sources(kernel.clone(), &mut files);
        let mut hash = Sha256::new();
        files
            .iter()
            .for_each(|file| hash.update(fs::read(file).unwrap()));
        let hash: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
        let name = kernel.file_stem().unwrap().to_str().unwrap();
        expected.insert(name.to_owned(), hash);
    }
    let embedded: BTreeMap<_, _> = modules()
        .into_iter()
        .map(|(name, hash, _)| (name, hash))
        .collect();
    assert_eq!(embedded, expected, "run scripts/compile-kernels.py");
}

/// Kernels for these may be started before the one before them has ended: none must forget to wait for it.
#[test]
fn kernels_that_may_start_early_wait() {
    let mut n = 0;
    for (module, _, text) in modules() {
        let (_, sm_90) = text.split_once("\n// sm_90\n").unwrap();
        for kernel in sm_90.split(".visible .entry ").skip(1) {
            let name = kernel.split('(').next().unwrap();
            let waits = kernel.contains("griddepcontrol.wait");
            assert!(waits, "{name} in {module} does not wait");
            n += 1;
        }
    }
    assert!(n > 80, "{n} kernels");
}

/// Grids of matrix-times-vector kernels are made for four blocks on a multiprocessor: each kernel must be compiled for that.
#[test]
fn as_many_blocks_run_at_a_time_as_grids_are_made_for() {
    let mut n = 0;
    for (module, _, text) in modules() {
        for kernel in text.split(".visible .entry ").skip(1) {
            let name = kernel.split('(').next().unwrap();
            if ["mat_vec_1", "mat_vec_2", "mat_vec_glu"].contains(&name) {
                let bound = kernel.contains(".minnctapersm 4");
                assert!(bound, "{name} in {module}");
                n += 1;
            }
        }
    }
    assert_eq!(n, 3 * 3 * 16, "three kernels, architectures, sixteen types");
}
