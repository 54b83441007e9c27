//! The router trace of `fitz-tec`: the probability of every expert, for every token and layer.
//!
//! `RTRACE01`, experts in a layer and version 0 as 32-bit numbers; then records of a token, a layer and the probabilities
//! (softmax over all experts, 32-bit floats), little-endian. How many experts a token is routed to is not in the file. The
//! weights that the model applies may be normalised or scaled, so the probabilities are not read as weights.

use moe_trace::{Facts, MAX_ID, RoutingRow, TokenId};

use crate::binary::mapped::Mapped;
use crate::{At, ForeignError, ImportOptions, Importer, Missing, Output, Source};

const MAGIC: &[u8] = b"RTRACE01";
const HEADER: usize = 16;

/// Why a trace is refused.
#[derive(Debug, thiserror::Error)]
enum RtraceFault {
    #[error("the header is cut off")]
    Header,
    #[error("version {version} of the trace is not known (0 is)")]
    Version { version: u32 },
    #[error("{n_expert} experts in a layer are not possible; the file is damaged")]
    Experts { n_expert: u32 },
    #[error(
        "a token cannot select {top_k} of {n_expert} experts; is that the number of the trace?"
    )]
    TopK { top_k: u32, n_expert: u32 },
    #[error("token {token_id} is out of range; the file is damaged")]
    Token { token_id: TokenId },
    #[error(
        "the probability {probability} of expert {expert} is not between 0 and 1; the file is damaged"
    )]
    Probability { probability: f32, expert: usize },
}

/// Router trace of fitz-tec.
pub struct RouterTrace;

impl Importer for RouterTrace {
    fn name(&self) -> &'static str {
        "rtrace"
    }

    fn description(&self) -> &'static str {
        "router trace of fitz-tec (RTRACE01): probabilities of all experts; needs the experts of a token"
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
        output.note("the trace contains no phases, and probabilities before normalization instead of router weights");
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
            return Err(output.invalid(At::Byte(8), RtraceFault::Experts { n_expert }));
        }
        Some((_, version)) => {
            return Err(output.invalid(At::Byte(12), RtraceFault::Version { version }));
        }
        None => return Err(output.invalid(At::Byte(8), RtraceFault::Header)),
    };
    let Some(top_k) = options.max_expert_used() else {
        return Err(output.lacks(At::Byte(8), Missing::TopK));
    };
    if top_k > n_expert {
        return Err(output.invalid(At::Byte(8), RtraceFault::TopK { top_k, n_expert }));
    }
    output.facts(&Facts {
        n_expert: Some(n_expert),
        ..Facts::default()
    })?;

    let record_size = 8 + 4 * n_expert as usize;
    let records = bytes[HEADER..].chunks_exact(record_size);
    let cut = records.remainder().len();
    let mut ranked = Vec::new();
    for (record, bytes) in records.enumerate() {
        let at = || At::Record {
            record: record as u64,
            offset: (HEADER + record * record_size) as u64,
        };
        rank(&bytes[8..], &mut ranked).map_err(|fault| output.invalid(at(), fault))?;
        let row = RoutingRow {
            token_id: TokenId(word(bytes)),
            ..RoutingRow::at_layer(output.layer_id(at, word(&bytes[4..]).into())?)
        };
        let RoutingRow { token_id, .. } = row;
        if i32::try_from(token_id.0).is_err() {
            return Err(output.invalid(at(), RtraceFault::Token { token_id }));
        }
        let top_k = options.n_expert_used_in(row.layer_id).unwrap_or(top_k);
        let best = ranked.iter().take(top_k as usize);
        output.token(at, &row, best.map(|&(expert, _)| (expert, None)))?;
    }
    if cut > 0 {
        output.note(format!(
            "the last record, at byte {}, is cut off and was left out",
            bytes.len() - cut
        ));
    }
    Ok(())
}

/// The experts by probability, the likeliest first; of equals, the first first.
fn rank(probabilities: &[u8], ranked: &mut Vec<(i64, f32)>) -> Result<(), RtraceFault> {
    ranked.clear();
    for (expert, &bytes) in probabilities.as_chunks::<4>().0.iter().enumerate() {
        let probability = f32::from_le_bytes(bytes);
        if !(0.0..=1.001).contains(&probability) {
            return Err(RtraceFault::Probability {
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
