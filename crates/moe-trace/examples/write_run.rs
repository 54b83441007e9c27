//! Writes a run directory with the routing of one layer, as a recorder of another program would.
//!
//!   cargo run --package moe-trace --example write_run -- MODEL.gguf RUN_DIRECTORY
//!   moe-analyze hotness RUN_DIRECTORY

use std::error::Error;
use std::path::Path;

use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_trace::manifest::{Engine, Model, ModelFile};
use moe_trace::ops::MUL_MAT_ID;
use moe_trace::record::{EXT_V1, PHASE_GENERATE, set_name};
use moe_trace::{Manifest, RunOptions, RunWriter, TensorAccessLog};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args_os().skip(1);
    let (Some(model), Some(dir)) = (args.next(), args.next()) else {
        return Err("usage: write_run MODEL.gguf RUN_DIRECTORY".into());
    };
    let routing = [[3, 1], [0, 3], [3, 2]];
    let n_records = write(Path::new(&model), Path::new(&dir), &routing)?;
    println!("{n_records} records");
    Ok(())
}

/// Writes a record for each token; `routing` has the selected experts of each token in layer 0. Returns the number of records.
pub fn write(model: &Path, dir: &Path, routing: &[[i32; 2]]) -> Result<u64, Box<dyn Error>> {
    let gguf = Gguf::open(model)?;
    let files = gguf.files().iter().map(|file| ModelFile {
        name: file.name.clone(),
        size_bytes: file.size_bytes,
    });
    let manifest = Manifest {
        engine: Engine {
            name: "example".into(),
            version: "1".into(),
        },
        model: Model {
            path: model.display().to_string(),
            files: files.collect(),
            header_xxh3: format!("{:016x}", gguf.header_xxh3()),
            n_expert_used: 2,
            ..Model::default()
        },
        policy: "cpu".into(),
        started: "2026-01-01T00:00:00Z".into(),
        ..Manifest::default()
    };
    let map = OffsetMap::new(&gguf);
    let mut writer = RunWriter::create(dir, manifest, &map, RunOptions::default())?;
    for (token, experts) in (0..).zip(routing) {
        let mut record = TensorAccessLog::default();
        record.timestamp_ns.set(1 + 1000 * u64::from(token));
        record.token_id.set(token);
        record.layer_id.set(0);
        record.operation_type = MUL_MAT_ID;
        record.phase = PHASE_GENERATE;
        record.ext_version = EXT_V1;
        record.n_tokens.set(1);
        set_name(&mut record.dst_name, "ffn_moe_gate-0");
        record.num_experts = 2;
        for (slot, &expert) in experts.iter().enumerate() {
            record.expert_ids[slot].set(expert);
            record.expert_weights[slot].set(0.5);
        }
        *writer.next_record()? = record;
        writer.flush()?;
    }
    writer.manifest_mut().tokens.generated = routing.len() as u64;
    Ok(writer.finish()?)
}
