//! Dumps of the expert distribution recorder of [SGLang](https://github.com/sgl-project/sglang), and expert counts of
//! [ktransformers](https://github.com/kvcache-ai/ktransformers): files of `torch.save`.
//!
//! | recorder mode | content |
//! |---|---|
//! | `stat`, `stat_approx` | `logical_count` `[steps, layers, experts]` |
//! | `per_pass` | `records`, one per forward pass, with `global_physical_count` `[layers, physical experts]` |
//! | `per_token` | `records` that also have `topk_ids_of_layer` `[layers, tokens, 8]` (padded with -1) and `positions` `[tokens]` |
//! | (ktransformers) | a tensor of counts `[layers, experts]`, without a dictionary |
//!
//! `last_physical_to_logical_map` `[layers, physical experts]` maps physical experts to those of the model. A record belongs to
//! one `rank`. A record is of the prompt phase if its `forward_mode` is EXTEND, and of the decode phase if it is DECODE; other
//! passes have no known phase. Requests have no identifier, so sequences follow from positions ([`sequences`]). Compared with our
//! records, the format lacks sequences, router weights, timestamps and lanes.
//!
//! Definition: `python/sglang/srt/eplb/expert_distribution.py`; the file format is described in [`crate::binary::torch`].

mod records;
mod sequences;

use moe_files::text::counted;
use moe_trace::{Phase, RoutingRow, TokenId};

use crate::arrays::{
    CountError, CountSums, PhysicalMap, RoutingError, element, element_of, n_used_slots,
    row_blocks, warn_if_routing,
};
use crate::binary::array::Array;
use crate::binary::error::BinaryError;
use crate::binary::mapped::Mapped;
use crate::binary::pickle::Value;
use crate::binary::torch::{self, TorchFile};
use crate::layers::RowUse;
use crate::{ForeignError, ImportOptions, Importer, Location, Output, Source};

use super::sglang_json::note_steps;
use records::{Content, Ranks, Record};
use sequences::{Mode, Sequences};

/// Values of `ForwardMode` in SGLang.
const EXTEND: i64 = 1;
const DECODE: i64 = 2;
const MIXED: i64 = 3;

/// Importer of dumps of SGLang's recorder.
pub struct SglangPt;

impl Importer for SglangPt {
    fn name(&self) -> &'static str {
        "sglang-pt"
    }

    fn description(&self) -> &'static str {
        "dump of SGLang's expert distribution recorder, or counts of ktransformers (.pt, read without executing code): routing or counts"
    }

    fn is_binary(&self) -> bool {
        true
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        torch::is_applicable(sample)
    }

    fn import(
        &self,
        source: &Source,
        options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        for file in source.files() {
            output.begin_file(file);
            let bytes = Mapped::open(file)?;
            let dump = TorchFile::open(&bytes).map_err(|error| invalid(error, output))?;
            import_dump(&dump, options, output)?;
        }
        Ok(())
    }
}

fn invalid(error: BinaryError, output: &Output<'_>) -> ForeignError {
    output.invalid(Location::Byte(error.offset), error.reason)
}

fn import_dump(
    dump: &TorchFile<'_>,
    options: &ImportOptions,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let root = dump.pickle().root();
    let entry = |key| dump.pickle().get(root, key);
    let counts = match tensor(dump, Some(root), output)? {
        Some(counts) => {
            warn_if_routing(&counts, options, output);
            Some(counts)
        }
        None => tensor(dump, entry("logical_count"), output)?,
    };
    if let Some(counts) = counts {
        note_steps(&counts, output);
        let mut sums = CountSums::default();
        sums.add(&counts, None)
            .map_err(|(index, error)| output.invalid(element(&index), error))?;
        return sums.finish(options, output);
    }
    let key = "last_physical_to_logical_map";
    let map = match tensor(dump, entry(key), output)? {
        None => None,
        Some(map) => {
            let at = || element_of(key, &[]);
            Some(PhysicalMap::new(map).map_err(|error| output.invalid(at(), error))?)
        }
    };
    let records = entry("records").and_then(|records| dump.pickle().list(records));
    let Some(records) = records else {
        let reason = "the file contains no logical_count, no records and no tensor of counts; use a dump of SGLang's recorder";
        return Err(invalid(dump.error(reason), output));
    };
    import_records(dump, records, map.as_ref(), options, output)
}

fn import_records<'d>(
    dump: &'d TorchFile<'d>,
    records: &[Value],
    map: Option<&PhysicalMap<'_>>,
    options: &ImportOptions,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let records = records.iter().enumerate();
    let records = records.map(|(i, &record)| Record::read(dump, i, record, output));
    let records = records.collect::<Result<Vec<_>, _>>()?;
    let ranks = records::ranks(&records)
        .map_err(|(i, error)| output.invalid(Location::Element(format!("records[{i}]")), error))?;
    let counted_rank = records.first().map(|record| record.rank);
    let mut sums = CountSums::default();
    let mut n_counted = 0;
    let mut sequences = Sequences::default();
    for record in &records {
        if matches!(ranks, Ranks::Equal(_)) && Some(record.rank) != counted_rank {
            continue;
        }
        match &record.content {
            Content::Experts(experts) => {
                let pass = ForwardPass::read(dump, record);
                pass.import(experts, map, &mut sequences, options, output)?;
            }
            Content::Counts(counts) => {
                let at = |index: &[usize]| {
                    let name = format!("records[{}].global_physical_count", record.number);
                    element_of(&name, index)
                };
                if map.is_none() {
                    return Err(output.invalid(at(&[]), CountError::NoMap));
                }
                sums.add(counts, map)
                    .map_err(|(index, error)| output.invalid(at(&index), error))?;
                n_counted += 1;
            }
        }
    }
    note_ranks(&ranks, output);
    note_sequences(&sequences, output);
    if n_counted > 0 {
        output.note(format!(
            "the counts of {} are summed",
            counted(n_counted, "pass")
        ));
        sums.finish(options, output)?;
    }
    Ok(())
}

fn note_ranks(ranks: &Ranks, output: &mut Output<'_>) {
    match ranks {
        Ranks::One => {}
        Ranks::Equal(n) => output.note(format!(
            "counted one of {n} ranks: their records are equal in every pass, as with tensor parallelism"
        )),
        Ranks::Different(n) => output.note(format!(
            "counted all {n} ranks: their records differ, as with data parallelism"
        )),
    }
}

fn note_sequences(sequences: &Sequences, output: &mut Output<'_>) {
    if sequences.n_sequences() > 1 {
        output.note("requests have no identifier: sequences are derived from token positions and the order of each batch");
    }
    if sequences.n_coinciding() > 0 {
        output.note(format!(
            "warning: {} at the position of another token of the same pass: passes of speculative decoding do not record requests, so \
             tokens of different requests are counted as one",
            counted(sequences.n_coinciding(), "token")
        ));
    }
    if sequences.n_ambiguous() > 0 {
        output.note(format!(
            "warning: {} may belong to another sequence: some of several sequences of equal length ended, and the dump does not record which",
            counted(sequences.n_ambiguous(), "token")
        ));
    }
}

fn tensor<'a>(
    dump: &TorchFile<'a>,
    value: Option<Value>,
    output: &Output<'_>,
) -> Result<Option<Array<'a>>, ForeignError> {
    let tensor = value.and_then(|value| dump.tensor(value)).transpose();
    tensor.map_err(|error| invalid(error, output))
}

/// A forward pass of mode `per_token`.
struct ForwardPass<'p> {
    record: usize,
    rank: Option<i64>,
    mode: Mode,
    /// Position of each token in its sequence.
    positions: &'p [Value],
    /// Number of tokens of each request.
    lens: Vec<usize>,
}

impl<'p> ForwardPass<'p> {
    fn read(dump: &'p TorchFile<'_>, record: &Record<'p>) -> Self {
        let get = |key| dump.pickle().get(record.value, key);
        let length = |value: &Value| match value {
            Value::Int(n) => usize::try_from(*n).ok(),
            _ => None,
        };
        let lens = get("extend_seq_lens").and_then(|list| dump.pickle().list(list));
        Self {
            record: record.number,
            rank: record.rank,
            mode: match get("forward_mode") {
                Some(Value::Int(EXTEND)) => Mode::Extend,
                Some(Value::Int(DECODE)) => Mode::Decode,
                Some(Value::Int(MIXED)) => Mode::Mixed,
                _ => Mode::Other,
            },
            positions: record.positions,
            lens: lens.unwrap_or_default().iter().map_while(length).collect(),
        }
    }

    /// The phase of all tokens; `None` for mixed passes and speculative decoding, whose tokens differ.
    fn phase(&self) -> Option<Phase> {
        match self.mode {
            Mode::Extend => Some(Phase::Prompt),
            Mode::Decode => Some(Phase::Generate),
            Mode::Mixed | Mode::Other => None,
        }
    }

    /// Passes on `experts`, `[layers, tokens, slots]`, layer by layer.
    fn import(
        &self,
        experts: &Array<'_>,
        map: Option<&PhysicalMap<'_>>,
        sequences: &mut Sequences,
        options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        let record = self.record;
        let &[n_layer, n_tokens, n_slots] = experts.shape() else {
            let reason = format!(
                "its shape {:?} is not [layers, tokens, slots]",
                experts.shape()
            );
            let at = Location::Element(format!("records[{record}].topk_ids_of_layer"));
            return Err(output.invalid(at, reason));
        };
        let row_use = |layer: usize| {
            RowUse::of_tokens((0..n_tokens).map(|token| {
                let slots = (0..n_slots).map(move |slot| [layer, token, slot]);
                slots.map(|index| experts.integer(&index))
            }))
        };
        if n_tokens == 0 {
            return Ok(()); // ranks without requests also record the pass
        }
        let at = || Location::Element(format!("records[{record}].topk_ids_of_layer"));
        output.check_slots(n_used_slots(experts), at)?;
        let blocks = row_blocks(options, n_layer, row_use, at, output)?;
        let positions = self.positions(n_tokens, sequences, output)?;
        // Without positions, the tokens of a pass cannot be assigned to requests.
        let sequence_ids = if self.positions.is_empty() {
            vec![None; n_tokens]
        } else {
            sequences.of_pass(self.rank, self.mode, &positions, &self.lens)
        };
        for (layer, block) in blocks.into_iter().enumerate() {
            let Some(layer_id) = block else {
                continue;
            };
            for (token, (&token_id, &sequence_id)) in
                positions.iter().zip(&sequence_ids).enumerate()
            {
                let at = || {
                    let index = [layer, token];
                    Location::Element(format!("records[{record}].topk_ids_of_layer{index:?}"))
                };
                let row = RoutingRow {
                    token_id: TokenId(token_id),
                    sequence_id,
                    phase: self.phase(),
                    ..RoutingRow::at_layer(layer_id)
                };
                let mut selected = Vec::new();
                for slot in 0..n_slots {
                    let expert = experts.integer(&[layer, token, slot]);
                    let expert = expert.and_then(|expert| logical(expert, layer, map));
                    let Some(expert) = expert else {
                        return Err(output.invalid(at(), RoutingError::NotExpert));
                    };
                    selected.push((expert, None));
                }
                output.token(at, &row, selected)?;
            }
        }
        Ok(())
    }

    /// The position of each token. Tokens of passes without positions are numbered consecutively.
    fn positions(
        &self,
        n_tokens: usize,
        sequences: &mut Sequences,
        output: &Output<'_>,
    ) -> Result<Vec<u32>, ForeignError> {
        let first = match self.positions {
            [] => sequences.number_tokens(n_tokens),
            _ => 0,
        };
        let position = |token: usize| match self.positions.get(token) {
            Some(&Value::Int(position)) => u32::try_from(position).ok(),
            Some(_) => None,
            None if self.positions.is_empty() => u32::try_from(first.saturating_add(token)).ok(),
            None => None,
        };
        let positions = (0..n_tokens).map(|token| {
            position(token).ok_or_else(|| {
                let at = format!("records[{}].positions[{token}]", self.record);
                let reason = "the token has no valid position; the file is damaged";
                output.invalid(Location::Element(at), reason)
            })
        });
        positions.collect()
    }
}

/// The expert of the model. Negative ids, which are empty slots, are unchanged.
fn logical(expert: i64, layer: usize, map: Option<&PhysicalMap<'_>>) -> Option<i64> {
    match (map, usize::try_from(expert)) {
        (Some(map), Ok(physical)) => i64::try_from(map.logical(layer, physical)?).ok(),
        _ => Some(expert),
    }
}
