//! Dumps of SGLang's recorder with several requests and ranks, written here in the format of `torch.save`.

use std::collections::BTreeSet;
use std::io::Write as _;

use rawzip::{CompressionMethod, ZipArchiveWriter};

use super::*;

const N_LAYER: usize = 4;
/// Values of `ForwardMode` in SGLang.
const EXTEND: i64 = 1;
const DECODE: i64 = 2;
const IDLE: i64 = 4;

/// A record: a forward pass whose experts are the same in all layers.
#[derive(Clone)]
struct DumpPass {
    /// `forward_pass_id`, `rank` and `gatherer_key`.
    ids: Option<(i64, i64, &'static str)>,
    mode: i64,
    /// `extend_seq_lens`: tokens of each request.
    lens: Option<Vec<i64>>,
    /// Position and experts of each token.
    tokens: Vec<(i64, [i32; 2])>,
}

fn pass(mode: i64, lens: Option<&[i64]>, tokens: &[(i64, [i32; 2])]) -> DumpPass {
    DumpPass {
        ids: None,
        mode,
        lens: lens.map(<[i64]>::to_vec),
        tokens: tokens.to_vec(),
    }
}

fn text(text: &str) -> Vec<u8> {
    let length = (text.len() as u32).to_le_bytes();
    [b"X", &length[..], text.as_bytes()].concat()
}

fn int(number: i64) -> Vec<u8> {
    [&[0x8a, 8], &number.to_le_bytes()[..]].concat()
}

fn list(items: &[Vec<u8>]) -> Vec<u8> {
    [b"](", &items.concat()[..], b"e"].concat()
}

fn tuple(numbers: &[usize]) -> Vec<u8> {
    let numbers: Vec<u8> = numbers.iter().flat_map(|&n| int(n as i64)).collect();
    [b"(", &numbers[..], b"t"].concat()
}

fn dict(entries: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let entries: Vec<u8> = entries
        .iter()
        .flat_map(|(key, value)| [text(key), value.clone()].concat())
        .collect();
    [b"}(", &entries[..], b"u"].concat()
}

/// A tensor of all 32-bit integers in storage `key`.
fn tensor(key: usize, [a, b, c]: [usize; 3]) -> Vec<u8> {
    [
        &b"ctorch._utils\n_rebuild_tensor_v2\n(("[..],
        &text("storage"),
        b"ctorch\nIntStorage\n",
        &text(&key.to_string()),
        &text("cpu"),
        &int((a * b * c) as i64),
        b"tQ",
        &int(0),
        &tuple(&[a, b, c]),
        &tuple(&[b * c, c, 1]),
        b"\x89ccollections\nOrderedDict\n)RtR",
    ]
    .concat()
}

/// A dump of `passes`. Negative positions are not written. Slots are padded to 8 with -1.
fn dump(passes: &[DumpPass]) -> Vec<u8> {
    let mut storages = Vec::new();
    let mut records = Vec::new();
    for (i, pass) in passes.iter().enumerate() {
        let token = |(_, experts): &(i64, [i32; 2])| [&experts[..], &[-1; 6]].concat();
        let layer: Vec<i32> = pass.tokens.iter().flat_map(token).collect();
        let storage = layer.repeat(N_LAYER).into_iter().flat_map(i32::to_le_bytes);
        storages.push(storage.collect::<Vec<u8>>());
        let positions = pass.tokens.iter().filter(|&&(at, _)| at >= 0);
        let positions: Vec<_> = positions.map(|&(at, _)| int(at)).collect();
        let lens = pass.lens.as_ref().map_or(b"N".to_vec(), |lens| {
            list(&lens.iter().map(|&n| int(n)).collect::<Vec<_>>())
        });
        let mut record = Vec::new();
        if let Some((id, rank, gatherer)) = pass.ids {
            record.push(("forward_pass_id", int(id)));
            record.push(("rank", int(rank)));
            record.push(("gatherer_key", text(gatherer)));
        }
        record.extend([
            ("forward_mode", int(pass.mode)),
            ("positions", list(&positions)),
            ("extend_seq_lens", lens),
            (
                "topk_ids_of_layer",
                tensor(i, [N_LAYER, pass.tokens.len(), 8]),
            ),
        ]);
        records.push(dict(&record));
    }
    let root = dict(&[("records", list(&records))]);
    let pickle = [b"\x80\x02", &root[..], b"."].concat();
    let mut bytes = Vec::new();
    let mut archive = ZipArchiveWriter::new(&mut bytes);
    let mut add = |name: &str, data: &[u8]| {
        let file = archive.new_file(name);
        let (mut entry, config) = file
            .compression_method(CompressionMethod::STORE)
            .start()
            .unwrap();
        let mut writer = config.wrap(&mut entry);
        writer.write_all(data).unwrap();
        let (_, descriptor) = writer.finish().unwrap();
        entry.finish(descriptor).unwrap();
    };
    add("x/data.pkl", &pickle);
    for (i, storage) in storages.iter().enumerate() {
        add(&format!("x/data/{i}"), storage);
    }
    archive.finish().unwrap();
    bytes
}

fn read_dump(
    passes: &[DumpPass],
    options: &ImportOptions,
) -> Result<(Summary, Kept), ForeignError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("dump.pt");
    fs::write(&path, dump(passes)).unwrap();
    read(&path, options)
}

/// `(sequence, position, expert)` of layer 0.
fn tokens(kept: &Kept) -> BTreeSet<(Option<u32>, u32, u32)> {
    let rows = kept.rows.iter().filter(|row| row.layer_id.0 == 0);
    rows.map(|row| (row.sequence_id, row.token_id.0, row.expert_id.0))
        .collect()
}

/// Request A selects experts 0 and 1 for all its tokens, request B experts 2 and 3.
#[test]
fn tokens_of_two_requests_are_two_sequences() {
    let (a, b) = ([0, 1], [2, 3]);
    let prompts = [(0, a), (1, a), (2, a), (0, b), (1, b), (2, b)];
    let passes = [
        pass(EXTEND, Some(&[3, 3]), &prompts),
        pass(DECODE, None, &[(3, a), (3, b)]),
        pass(DECODE, None, &[(4, a), (4, b)]),
        // One request ended. Both have the same length, so the dump does not show which.
        pass(DECODE, None, &[(5, b)]),
    ];
    let (summary, kept) = read_dump(&passes[..3], &options()).unwrap();
    let mut expected = BTreeSet::new();
    for position in 0..5 {
        for (sequence, experts) in [(0, [0, 1]), (1, [2, 3])] {
            expected.extend(experts.map(|expert| (Some(sequence), position, expert)));
        }
    }
    assert_eq!(tokens(&kept), expected);
    assert_eq!(kept.rows.len(), 10 * 2 * N_LAYER);
    assert!(!has_note(&summary, "warning"), "{summary:?}");
    let (summary, _) = read_dump(&passes, &options()).unwrap();
    assert!(
        has_note(&summary, "warning: 1 token may belong to another sequence"),
        "{summary:?}"
    );
}

#[test]
fn numbers_tokens_without_positions_over_all_passes() {
    let passes = [
        pass(EXTEND, None, &[(-1, [0, 1]), (-1, [2, 3])]),
        pass(DECODE, None, &[(-1, [4, 5])]),
    ];
    let (_, kept) = read_dump(&passes, &options()).unwrap();
    let experts = [(0, [0, 1]), (1, [2, 3]), (2, [4, 5])];
    let expected = experts.map(|(token, experts)| experts.map(|expert| (None, token, expert)));
    assert_eq!(tokens(&kept), expected.concat().into_iter().collect());
}

/// An idle pass of a data-parallel rank has an empty tensor.
#[test]
fn skips_passes_without_tokens() {
    let a = [0, 1];
    let passes = [
        pass(EXTEND, Some(&[2]), &[(0, a), (1, a)]),
        pass(IDLE, None, &[]),
        pass(DECODE, None, &[(2, a)]),
    ];
    for options in [model(4, 0, &[0, 1, 2, 3]), options()] {
        let (summary, kept) = read_dump(&passes, &options).unwrap();
        assert_eq!(kept.rows.len(), 3 * 2 * N_LAYER);
        let has_model = options.model.is_some();
        assert_eq!(summary.missing.is_empty(), has_model, "{summary:?}");
    }
    let error = read_dump(&passes[1..2], &model(4, 0, &[0, 1, 2, 3])).unwrap_err();
    assert!(matches!(error, ForeignError::NoRouting { .. }), "{error}");
}

/// A prompt and a decode pass of two ranks, ordered by rank or, if `is_interleaved`, by pass.
fn of_ranks(experts: [[i32; 2]; 2], is_interleaved: bool) -> Vec<DumpPass> {
    let mut passes: Vec<DumpPass> = (0..2)
        .flat_map(|rank| {
            let experts = experts[rank as usize];
            [
                DumpPass {
                    ids: Some((10, rank, "primary")),
                    ..pass(EXTEND, Some(&[2]), &[(0, experts), (1, experts)])
                },
                DumpPass {
                    ids: Some((11, rank, "primary")),
                    ..pass(DECODE, None, &[(2, experts)])
                },
            ]
        })
        .collect();
    if is_interleaved {
        passes.swap(1, 2);
    }
    passes
}

#[test]
fn counts_all_ranks_that_differ() {
    for is_interleaved in [false, true] {
        let passes = of_ranks([[0, 1], [2, 3]], is_interleaved);
        let (summary, kept) = read_dump(&passes, &options()).unwrap();
        let mut expected = BTreeSet::new();
        for position in 0..3 {
            for (sequence, experts) in [(0, [0, 1]), (1, [2, 3])] {
                expected.extend(experts.map(|expert| (Some(sequence), position, expert)));
            }
        }
        assert_eq!(tokens(&kept), expected);
        assert_eq!(kept.rows.len(), 6 * 2 * N_LAYER);
        assert!(has_note(&summary, "counted all 2 ranks"), "{summary:?}");
    }
}

#[test]
fn counts_one_of_several_equal_ranks() {
    for is_interleaved in [false, true] {
        let passes = of_ranks([[0, 1], [0, 1]], is_interleaved);
        let (summary, kept) = read_dump(&passes, &options()).unwrap();
        assert_eq!(kept.rows.len(), 3 * 2 * N_LAYER);
        assert!(has_note(&summary, "counted one of 2 ranks"), "{summary:?}");
        // Ranks differ if one of them lacks a pass.
        let (summary, kept) = read_dump(&passes[..3], &options()).unwrap();
        assert_eq!(kept.rows.len(), 5 * 2 * N_LAYER);
        assert!(has_note(&summary, "counted all 2 ranks"), "{summary:?}");
    }
}

#[test]
fn rejects_partial_experts_and_several_gatherers() {
    let passes = of_ranks([[0, -1], [-1, 1]], false);
    let error = read_dump(&passes, &options()).unwrap_err();
    assert!(matches!(error, ForeignError::Invalid { .. }), "{error}");
    let mut passes = of_ranks([[0, 1], [0, 1]], false);
    passes[1].ids = Some((11, 0, "child_a"));
    let error = read_dump(&passes, &options()).unwrap_err();
    assert_eq!(
        error.location(),
        Some(&Location::Element("records[1]".into())),
        "{error}"
    );
}

#[test]
fn rejects_a_pass_with_a_higher_top_k_than_the_model() {
    let mut options = model(4, 0, &[0, 1, 2, 3]);
    options.model.as_mut().unwrap().n_expert_used = Some(1);
    let error = read_dump(&[pass(DECODE, None, &[(0, [0, 1])])], &options).unwrap_err();
    assert!(
        matches!(
            error,
            ForeignError::Layers {
                source: LayerError::Slots { n_slots: 2, max: 1 },
                ..
            }
        ),
        "{error}"
    );
}
