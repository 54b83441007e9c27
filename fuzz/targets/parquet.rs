//! Parquet tables: a byte that selects the reader, and the file.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moe_foreign::{Collected, ImportOptions, Input};
use moe_fuzz::{check_error, file};
use moe_trace::map_table;
use moe_trace::tables::{read_routing, routing_files};

fuzz_target!(|input: &[u8]| {
    let Some((selector, bytes)) = input.split_first() else {
        return;
    };
    let path = file("table.parquet", bytes);
    match selector % 4 {
        0 => {
            match map_table::read(&path) {
                Ok(map) => drop(map.rows.len()),
                Err(error) => check_error(&error),
            }
            if let Err(error) = map_table::identity(&path) {
                check_error(&error);
            }
        }
        1 => match read_routing(&path) {
            Ok(batches) => {
                for batch in batches {
                    match batch {
                        Ok(batch) => assert_eq!(batch.len(), batch.token_id().len()),
                        Err(error) => return check_error(&error),
                    }
                }
            }
            Err(error) => check_error(&error),
        },
        2 => match routing_files(&path) {
            Ok(files) => {
                for file in files {
                    for part in 0..file.n_parts() {
                        match file.read_part(part) {
                            Ok(batches) => {
                                for batch in batches {
                                    match batch {
                                        Ok(batch) => {
                                            assert_eq!(batch.len(), batch.expert_id().len());
                                        }
                                        Err(error) => return check_error(&error),
                                    }
                                }
                            }
                            Err(error) => return check_error(&error),
                        }
                    }
                }
            }
            Err(error) => check_error(&error),
        },
        _ => {
            if let Err(error) =
                Input::Tables(path).read(&ImportOptions::default(), &mut Collected::default())
            {
                check_error(&error);
            }
        }
    }
});
