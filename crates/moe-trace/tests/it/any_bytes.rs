//! Reading a trace with any bytes returns records, tables or an error, and never panics.

use std::collections::HashSet;
use std::fs;

use moe_trace::correlation::unresolved;
use moe_trace::graph;
use moe_trace::passes::Passes;
use moe_trace::record::NAME_SIZE;
use moe_trace::tables::{TableOptions, write_tables};
use moe_trace::{Error, ExpertId, Phase, Run, RunOptions, RunWriter, Trace, map_table};
use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::common::{expert_layer, gpt_oss, manifest};

fn options() -> TableOptions<'static> {
    TableOptions {
        force: true,
        ..Default::default()
    }
}

/// Calls all functions that read records.
fn walk(trace: &Trace) -> usize {
    let mut n = 0;
    for operation in trace.operations() {
        for token in operation.tokens() {
            n += token.records().len();
            for expert in token.experts() {
                assert!(expert.expert_id <= ExpertId(i32::MAX as u32));
            }
        }
        let head = operation.head();
        assert!(head.dst_name().len() <= 3 * NAME_SIZE);
        for i in 0..=head.sources().len() {
            head.source_size(i);
        }
        head.sources().iter().for_each(|source| drop(source.name()));
    }
    n
}

/// Builds graphs and checks that edges connect nodes of the graph; counts unresolved accesses.
fn make_graphs(run: &Run) {
    for phase in Phase::ALL {
        if let Some(graph) = graph::reconstruct(run, phase) {
            let ids: HashSet<&str> = graph.nodes.iter().map(|node| node.id.as_str()).collect();
            let ends = graph
                .edges
                .iter()
                .flat_map(|edge| [&edge.source, &edge.target]);
            assert!(ends.into_iter().all(|id| ids.contains(id.as_str())));
            let mut dot = Vec::new();
            graph.write_dot(&mut dot).unwrap();
            let n_lines = dot.iter().filter(|&&byte| byte == b'\n').count();
            assert!(n_lines > graph.nodes.len() + graph.edges.len());
        }
    }
    let (unresolved, n_accesses) = unresolved(run);
    assert!(
        unresolved
            .iter()
            .map(|source| source.n_accesses)
            .sum::<u64>()
            <= n_accesses
    );
    let n: usize = Passes::new(run.trace.operations())
        .map(|pass| pass.n_operations())
        .sum();
    assert_eq!(n, run.trace.operations().count());
}

/// Writes tables, or gets an error that names a record.
fn make_tables(run: &Run, dir: &std::path::Path) {
    match write_tables(run, dir, options()) {
        Ok(summary) => assert_eq!(summary.records, run.trace.records().len() as u64),
        Err(Error::Record { record, .. }) => assert!(record < run.trace.records().len() as u64),
        Err(error) => panic!("{error}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn random_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..8192)) {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("trace.bin");
        fs::write(&path, &bytes).unwrap();
        let run = Run::open(&path).unwrap();
        prop_assert_eq!(walk(&run.trace), run.trace.records().len());
        prop_assert_eq!(run.trace.truncated_bytes(), bytes.len() as u64 % 1024);
        make_tables(&run, tmp.path());
        make_graphs(&run);
    }

    /// A valid run with some bytes changed and its end truncated.
    #[test]
    fn changed_bytes(changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..40), cut in 0..3000usize) {
        let (gguf, map) = gpt_oss();
        let tmp = tempfile::tempdir().unwrap();
        let dir = tmp.path().join("run");
        RunWriter::create(&dir, manifest(), &map, RunOptions::default()).unwrap().finish().unwrap();
        let records = [0, 1].map(|layer| expert_layer(&gguf, 10 + u64::from(layer), layer, 0, &[&[1, 2], &[3, 15]])).concat();
        let mut bytes = records.as_bytes().to_vec();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        bytes.truncate(bytes.len() - cut);
        fs::write(dir.join("trace.bin"), &bytes).unwrap();
        let run = Run::open(&dir).unwrap();
        prop_assert_eq!(walk(&run.trace), run.trace.records().len());
        make_tables(&run, tmp.path());
        make_graphs(&run);
    }

    /// A map with some bytes changed is read or refused.
    #[test]
    fn changed_map(changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        let (_, map) = gpt_oss();
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("map.parquet");
        map_table::write(&path, &map, &[], false).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        fs::write(&path, &bytes).unwrap();
        if let Err(error) = map_table::read(&path) {
            prop_assert!(!error.to_string().contains('\n'));
        }
    }
}

/// The Parquet decoder panics on some of these files.
#[test]
fn reads_or_refuses_map_with_any_byte_changed() {
    let (_, map) = gpt_oss();
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("map.parquet");
    map_table::write(&path, &map, &[], false).unwrap();
    let original = fs::read(&path).unwrap();
    for at in 0..original.len() {
        let mut bytes = original.clone();
        bytes[at] = 125;
        fs::write(&path, &bytes).unwrap();
        if let Err(error) = map_table::read(&path) {
            let error = error.to_string();
            assert!(
                error.contains("map.parquet") && !error.contains('\n'),
                "{error}"
            );
        }
    }
}
