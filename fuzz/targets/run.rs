//! Run directories: the size of the manifest (u16), the manifest, and the trace. Size 0 is a trace without a manifest.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moe_fuzz::{check_error, file};
use moe_trace::manifest::Manifest;
use moe_trace::{Run, TRACE_FILE};

fuzz_target!(|input: &[u8]| {
    let Some((size, rest)) = input.split_first_chunk() else {
        return;
    };
    let size = usize::from(u16::from_le_bytes(*size)).min(rest.len());
    let (manifest, trace) = rest.split_at(size);
    let trace = file(TRACE_FILE, trace);
    let path = match size {
        0 => trace,
        _ => {
            let path = file("manifest.json", manifest);
            match Manifest::read(&path) {
                Ok(manifest) => {
                    manifest.new_run_id();
                    let copy = path.with_file_name("copy.json");
                    manifest
                        .write(&copy)
                        .expect("a valid manifest can be written");
                    let again = Manifest::read(&copy).expect("a written manifest is valid");
                    assert_eq!(manifest, again);
                    Manifest::missing_keys(&path).expect("the manifest is readable");
                }
                Err(error) => {
                    check_error(&error);
                    return;
                }
            }
            path.parent().expect("a file has a directory").to_owned()
        }
    };
    match Run::open(&path) {
        Ok(run) => {
            run.id();
            moe_fuzz::walk(&run);
        }
        Err(error) => check_error(&error),
    }
});
