//! Router trace of [fitz-tec](https://github.com/yafitzdev/fitz-tec) (`RTRACE01`): the router probabilities of all experts.
//!
//! | part | content (little-endian) |
//! |---|---|
//! | header, 16 bytes | magic `RTRACE01`, experts per layer (i32), version (i32, 0) |
//! | one record per token and layer | token (i32), layer (i32), softmax over all experts (f32 `[experts]`) |
//!
//! The selected experts are the top-k probabilities; k is not in the file and must be known ([`ImportOptions`]). Of equal
//! probabilities the lower expert id is selected. Probabilities are not read as router weights, because models normalize or
//! scale the weights that they apply. Compared with our records, the format lacks sequences, phases, router weights, timestamps
//! and lanes.
//!
//! Definition: `fitz_tec/tools/_trace_format.py` in that repository.

use moe_trace::{MAX_ID, ModelInfo, RoutingRow, TokenId};

use crate::binary::mapped::Mapped;
use crate::{ForeignError, ImportOptions, Importer, Location, Missing, Output, Source};

const MAGIC: &[u8] = b"RTRACE01";
/// Size of the header in bytes.
const HEADER: usize = 16;

/// Why a trace is invalid.
#[derive(Debug, thiserror::Error)]
enum RtraceError {
    #[error("the header of 16 bytes is truncated; copy the file again")]
    Header,
    #[error("{n_expert} experts per layer is out of range (1..={MAX_ID}); the file is damaged")]
    Experts { n_expert: u32 },
    #[error("token {token_id} is out of range (0..=2147483647); the file is damaged")]
    Token { token_id: TokenId },
    #[error(
        "probability {probability} of expert {expert} is out of range (0..=1); the file is damaged"
    )]
    Probability { probability: f32, expert: usize },
}

/// Importer of `RTRACE01` files.
pub struct RouterTrace;

impl Importer for RouterTrace {
    fn name(&self) -> &'static str {
        "rtrace"
    }

    fn description(&self) -> &'static str {
        "router trace of fitz-tec (RTRACE01), probabilities of all experts; needs the top-k: routing"
    }

    fn is_binary(&self) -> bool {
        true
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        sample.starts_with(MAGIC)
    }

    fn import(
        &self,
        source: &Source,
        options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        for file in source.files() {
            output.begin_file(file);
            import_file(&Mapped::open(file)?, options, output)?;
        }
        output.note("phases are not recorded; router probabilities are not read as router weights, which models normalize or scale");
        Ok(())
    }
}

fn import_file(
    bytes: &[u8],
    options: &ImportOptions,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let header = bytes
        .get(..HEADER)
        .map(|header| (word(&header[8..]), word(&header[12..])));
    let n_expert = match header {
        Some((n_expert @ 1..=MAX_ID, 0)) => n_expert,
        Some((n_expert, 0)) => {
            return Err(output.invalid(Location::Byte(8), RtraceError::Experts { n_expert }));
        }
        Some((_, version)) => {
            return Err(output.version(Location::Byte(12), version, "0"));
        }
        None => return Err(output.invalid(Location::Byte(8), RtraceError::Header)),
    };
    let Some(top_k) = options.max_expert_used() else {
        return Err(output.not_recorded(Location::Byte(8), Missing::TopK));
    };
    if top_k > n_expert {
        let reason = format!("a token cannot select {top_k} of {n_expert} experts");
        return Err(output.wrong_top_k(Location::Byte(8), reason));
    }
    output.model_info(&ModelInfo {
        n_expert: Some(n_expert),
        ..ModelInfo::default()
    })?;

    let record_size = 8 + 4 * n_expert as usize;
    let records = bytes[HEADER..].chunks_exact(record_size);
    let n_truncated = records.remainder().len();
    let mut ranked = Vec::new();
    for (record, bytes) in records.enumerate() {
        let at = || Location::Record {
            record: record as u64,
            offset: (HEADER + record * record_size) as u64,
        };
        rank(&bytes[8..], &mut ranked).map_err(|error| output.invalid(at(), error))?;
        let row = RoutingRow {
            token_id: TokenId(word(bytes)),
            ..RoutingRow::at_layer(output.layer_id(at, word(&bytes[4..]).into())?)
        };
        let RoutingRow { token_id, .. } = row;
        if i32::try_from(token_id.0).is_err() {
            return Err(output.invalid(at(), RtraceError::Token { token_id }));
        }
        let top_k = options.n_expert_used_in(row.layer_id).unwrap_or(top_k);
        let best = ranked.iter().take(top_k as usize);
        output.token(at, &row, best.map(|&(expert, _)| (expert, None)))?;
    }
    if n_truncated > 0 {
        output.note(format!(
            "the file is truncated; skipped its incomplete last record at byte {}",
            bytes.len() - n_truncated
        ));
    }
    Ok(())
}

/// Sorts the experts by probability, highest first; among equals, the lower id comes first.
fn rank(probabilities: &[u8], ranked: &mut Vec<(i64, f32)>) -> Result<(), RtraceError> {
    ranked.clear();
    for (expert, &bytes) in probabilities.as_chunks::<4>().0.iter().enumerate() {
        let probability = f32::from_le_bytes(bytes);
        if !(0.0..=1.001).contains(&probability) {
            return Err(RtraceError::Probability {
                probability,
                expert,
            });
        }
        ranked.push((expert as i64, probability));
    }
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
    Ok(())
}

fn word(bytes: &[u8]) -> u32 {
    bytes
        .first_chunk()
        .map_or(0, |&bytes| u32::from_le_bytes(bytes))
}
