//! The embedded PTX is that of the kernels' sources.

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

/// The text of a compressed PTX file.
fn read_ptx(path: &Path) -> String {
    let compressed = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    String::from_utf8(zstd::decode_all(&*compressed).unwrap()).unwrap()
}

#[test]
fn ptx_is_as_new_as_its_source() {
    let cuda = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda");
    let mut expected = Vec::new();
    for kernel in fs::read_dir(cuda.join("kernels")).unwrap() {
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
        let name = format!("{}.ptx.zst", kernel.file_stem().unwrap().display());
        let ptx = read_ptx(&cuda.join("ptx").join(&name));
        assert_eq!(
            ptx.lines().next(),
            Some(&*format!("// sources: sha256 {hash}")),
            "{name} is older than its source: run scripts/compile-kernels.py"
        );
        expected.push(name);
    }
    let files = fs::read_dir(cuda.join("ptx")).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    let strays: Vec<_> = names.filter(|name| !expected.contains(name)).collect();
    assert!(strays.is_empty(), "PTX without a source: {strays:?}");
    assert!(!expected.is_empty());
}

/// Kernels for these may be started before the one before them has ended: none must forget to wait for it.
#[test]
fn kernels_that_may_start_early_wait() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda/ptx");
    let mut n = 0;
    for file in fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let text = read_ptx(&path);
        let (_, sm_90) = text.split_once("\n// sm_90\n").unwrap();
        for kernel in sm_90.split(".visible .entry ").skip(1) {
            let name = kernel.split('(').next().unwrap();
            let waits = kernel.contains("griddepcontrol.wait");
            assert!(waits, "{name} in {} does not wait", path.display());
            n += 1;
        }
    }
    assert!(n > 80, "{n} kernels");
}

/// Grids of matrix-times-vector kernels are made for four blocks on a multiprocessor: each kernel must be compiled for that.
#[test]
fn as_many_blocks_run_at_a_time_as_grids_are_made_for() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda/ptx");
    let mut n = 0;
    for file in fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let text = read_ptx(&path);
        for kernel in text.split(".visible .entry ").skip(1) {
            let name = kernel.split('(').next().unwrap();
            if ["mat_vec_1", "mat_vec_2", "mat_vec_glu"].contains(&name) {
                let bound = kernel.contains(".minnctapersm 4");
                assert!(bound, "{name} in {}", path.display());
                n += 1;
            }
        }
    }
    assert_eq!(n, 3 * 3 * 16, "three kernels, architectures, sixteen types");
}
