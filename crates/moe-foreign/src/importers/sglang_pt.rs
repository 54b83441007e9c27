//! What SGLang's recorder of expert distributions dumps, and ktransformers' counts: files of `torch.save`.
//!
//! Modes `stat` and `stat_approx`: a dictionary with `logical_count` `[steps, layers, experts]`. Mode `per_pass`: `records`, one a
//! forward pass, with `global_physical_count` `[layers, physical]`. Mode `per_token`: records with `topk_ids_of_layer`
//! `[layers, tokens, 8]` too, filled up with -1, and with `positions`. Physical experts are those of
//! `last_physical_to_logical_map`. A record is of one `rank`. ktransformers also takes a tensor of counts alone.

mod records;
mod sequences;

use moe_gguf::text::counted;
use moe_trace::{Phase, RoutingRow, TokenId};

use crate::arrays::{
    CountSums, PhysicalMap, element, element_of, n_used_slots, row_blocks, warn_of_routing,
};
use crate::binary::array::Array;
use crate::binary::fault::BinaryFault;
use crate::binary::mapped::Mapped;
use crate::binary::pickle::Value;
use crate::binary::torch::{self, TorchFile};
use crate::layers::RowUse;
use crate::{At, ForeignError, ImportOptions, Importer, Output, Source};

use super::sglang_json::note_steps;
use records::{Content, Ranks, Record};
use sequences::{Mode, Sequences};

/// `ForwardMode` of SGLang.
const EXTEND: i64 = 1;
const DECODE: i64 = 2;
const MIXED: i64 = 3;

/// Dump of SGLang's recorder.
pub struct SglangPt;

impl Importer for SglangPt {
    fn name(&self) -> &'static str {
        "sglang-pt"
    }

    fn description(&self) -> &'static str {
        "dump of SGLang's expert distribution recorder, or counts of ktransformers (.pt); nothing in it is run"
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
            let dump = TorchFile::open(&bytes).map_err(|fault| invalid(fault, output))?;
            import_dump(&dump, options, output)?;
        }
        Ok(())
    }
}

fn invalid(fault: BinaryFault, output: &Output<'_>) -> ForeignError {
    output.invalid(At::Byte(fault.offset), fault.reason)
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
            warn_of_routing(&counts, options, output);
            Some(counts)
        }
        None => tensor(dump, entry("logical_count"), output)?,
    };
    if let Some(counts) = counts {
        note_steps(&counts, output);
        let mut sums = CountSums::default();
        sums.add(&counts, None)
            .map_err(|(index, reason)| output.invalid(element(&index), reason))?;
        return sums.finish(options, output);
    }
    let map = match tensor(dump, entry("last_physical_to_logical_map"), output)? {
        None => None,
        Some(map) => {
            Some(PhysicalMap::new(map).map_err(|reason| output.invalid(element(&[]), reason))?)
        }
    };
    let records = entry("records").and_then(|records| dump.pickle().list(records));
    let Some(records) = records else {
        let reason = "neither logical_count nor records of SGLang's recorder, nor a tensor of counts; give a dump of the recorder";
        return Err(invalid(dump.fault(reason), output));
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
        .map_err(|(i, fault)| output.invalid(At::Element(format!("records[{i}]")), fault))?;
    let counted_rank = records.first().map(|record| record.rank);
    let mut sums = CountSums::default();
    let mut n_counted = 0;
    let mut sequences = Sequences::default();
    for record in &records {
        if matches!(ranks, Ranks::Same(_)) && Some(record.rank) != counted_rank {
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
                    let reason = "counts of physical experts without last_physical_to_logical_map: it is unknown which experts of the model they are; give the complete dump";
                    return Err(output.invalid(at(&[]), reason));
                }
                sums.add(counts, map)
                    .map_err(|(index, reason)| output.invalid(at(&index), reason))?;
                n_counted += 1;
            }
        }
    }
    note_ranks(&ranks, output);
    note_sequences(&sequences, output);
    if n_counted > 0 {
        output.note(format!(
            "the counts of {} were summed",
            counted(n_counted, "pass")
        ));
        sums.finish(options, output)?;
    }
    Ok(())
}

fn note_ranks(ranks: &Ranks, output: &mut Output<'_>) {
    match ranks {
        Ranks::One => {}
        Ranks::Same(n) => output.note(format!(
            "counted once: the records of {n} ranks, which are equal in every pass, as of ranks that share their tokens (tensor parallelism)"
        )),
        Ranks::Separate(n) => output.note(format!(
            "the records of {n} ranks were counted together: they differ, as of ranks with tokens of their own (data parallelism)"
        )),
    }
}

fn note_sequences(sequences: &Sequences, output: &mut Output<'_>) {
    if sequences.n_sequences() > 1 {
        output.note("requests have no names in the dump: sequences follow from the positions of tokens and their order in a batch");
    }
    if sequences.n_coinciding() > 0 {
        output.note(format!(
            "warning: {} at the position of another token of the same pass: the dump does not show the requests of speculative \
             passes, so tokens of different requests count as one",
            counted(sequences.n_coinciding(), "token")
        ));
    }
    if sequences.n_ambiguous() > 0 {
        output.note(format!(
            "warning: {} may be of another sequence: of several sequences of one length some ended, and the dump does not show which",
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
    tensor.map_err(|fault| invalid(fault, output))
}

/// A forward pass, mode `per_token`.
struct ForwardPass<'p> {
    record: usize,
    rank: Option<i64>,
    mode: Mode,
    /// Of each token in its sequence.
    positions: &'p [Value],
    /// Tokens of each request.
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

    /// The phase of all tokens; a mixed pass, or one of speculative decoding, does not show which token is which.
    fn phase(&self) -> Option<Phase> {
        match self.mode {
            Mode::Extend => Some(Phase::Prompt),
            Mode::Decode => Some(Phase::Generate),
            Mode::Mixed | Mode::Other => None,
        }
    }

    /// Hands over `experts`, `[layers, tokens, slots]`, in the order in which they were computed.
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
            let at = At::Element(format!("records[{record}].topk_ids_of_layer"));
            return Err(output.invalid(at, reason));
        };
        let row_use = |layer: usize| {
            RowUse::of_tokens((0..n_tokens).map(|token| {
                let slots = (0..n_slots).map(move |slot| [layer, token, slot]);
                slots.map(|index| experts.integer(&index))
            }))
        };
        if n_tokens == 0 {
            return Ok(()); // a rank without requests takes part in the passes of the others
        }
        let at = || At::Element(format!("records[{record}].topk_ids_of_layer"));
        output.check_slots(n_used_slots(experts), at)?;
        let blocks = row_blocks(options, n_layer, row_use, at, output)?;
        let positions = self.positions(n_tokens, sequences, output)?;
        // Without positions a pass does not show which tokens are of one request.
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
                    At::Element(format!("records[{record}].topk_ids_of_layer{index:?}"))
                };
                let row = RoutingRow {
                    token_id: TokenId(token_id),
                    sequence_id,
                    phase: self.phase(),
                    ..RoutingRow::at_layer(layer_id)
                };
                let mut chosen = Vec::new();
                for slot in 0..n_slots {
                    let expert = experts.integer(&[layer, token, slot]);
                    let expert = expert.and_then(|expert| logical(expert, layer, map));
                    let Some(expert) = expert else {
                        let reason = format!(
                            "slot {slot} holds no expert that is known; the file is damaged"
                        );
                        return Err(output.invalid(at(), reason));
                    };
                    chosen.push((expert, None));
                }
                output.token(at, &row, chosen)?;
            }
        }
        Ok(())
    }

    /// The position of each token; where none is recorded, its place in the passes without positions.
    fn positions(
        &self,
        n_tokens: usize,
        sequences: &mut Sequences,
        output: &Output<'_>,
    ) -> Result<Vec<u32>, ForeignError> {
        let first = match self.positions {
            [] => sequences.first_unplaced(n_tokens),
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
                let reason = "the token has no position; the file is damaged";
                output.invalid(At::Element(at), reason)
            })
        });
        positions.collect()
    }
}

/// The model's expert; negative ids mark empty slots and stay.
fn logical(expert: i64, layer: usize, map: Option<&PhysicalMap<'_>>) -> Option<i64> {
    match (map, usize::try_from(expert)) {
        (Some(map), Ok(physical)) => i64::try_from(map.logical(layer, physical)?).ok(),
        _ => Some(expert),
    }
}
