//! JSON files of a run: a byte that selects `buffers.jsonl`, `transfers.jsonl` or a graph, and the file.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moe_fuzz::{check_error, file};
use moe_trace::buffers::{self, Timeline};
use moe_trace::graph::Graph;
use moe_trace::transfers;

fuzz_target!(|input: &[u8]| {
    let Some((selector, bytes)) = input.split_first() else {
        return;
    };
    match selector % 3 {
        0 => match buffers::read(&file("buffers.jsonl", bytes)) {
            Ok(events) => {
                let (timeline, _) = Timeline::new(&events);
                timeline.at_peak();
                serde_json::to_string(&timeline).expect("a timeline is JSON");
            }
            Err(error) => check_error(&error),
        },
        1 => match transfers::read(&file("transfers.jsonl", bytes)) {
            Ok(transfers) => {
                for transfer in transfers {
                    transfer.window.ns();
                    serde_json::to_string(&transfer).expect("a transfer is JSON");
                }
            }
            Err(error) => check_error(&error),
        },
        _ => match Graph::read(&file("graph.json", bytes)) {
            Ok(graph) => graph
                .write_dot(&mut std::io::sink())
                .expect("writing to a sink cannot fail"),
            Err(error) => check_error(&error),
        },
    }
});
