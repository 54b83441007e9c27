//! Binary routing log of [mbolt](https://github.com/doramirdor/mbolt) (`MBOLT_TRACE`): little-endian 32-bit integers.
//!
//! | part | content |
//! |---|---|
//! | header, 12 bytes | magic `MBLT`, version (1), experts per layer |
//! | one record per layer of a pass | layer, k, n_tokens, then expert ids `[n_tokens, k]` |
//!
//! Records are in the order of the graph, so a pass ends where the layer number does not increase ([`crate::passes`]). In a prompt pass
//! the last layer routes only the tokens whose outputs are requested. Compared with our records, the format lacks sequences,
//! phases, router weights, timestamps and lanes.
//!
//! Definition: `mbolt/src/mbolt/trace.py` in that repository.

use moe_trace::{MAX_ID, ModelInfo, RoutingRow, TokenId};

use crate::binary::mapped::Mapped;
use crate::passes::Passes;
use crate::{ForeignError, ImportOptions, Importer, Location, Output, Source};

const MAGIC: u32 = 0x544C_424D;
/// Size of the header in bytes.
const HEADER: usize = 12;

/// Why a log is invalid.
#[derive(Debug, thiserror::Error)]
enum MboltError {
    #[error("the header of 12 bytes is truncated; copy the file again")]
    Header,
    #[error(
        "layer {layer}, {k} experts per token or {n_tokens} tokens is out of range; the file is damaged"
    )]
    Record { layer: u32, k: u32, n_tokens: u32 },
}

/// Importer of mbolt logs.
pub struct Mbolt;

impl Importer for Mbolt {
    fn name(&self) -> &'static str {
        "mbolt"
    }

    fn description(&self) -> &'static str {
        "binary routing log of mbolt: routing"
    }

    fn is_binary(&self) -> bool {
        true
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        number(sample, 0) == Some(MAGIC)
    }

    fn import(
        &self,
        source: &Source,
        _options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        for file in source.files() {
            output.begin_file(file);
            import_file(&Mapped::open(file)?, output)?;
        }
        output.note("phases and router weights are not recorded");
        Ok(())
    }
}

fn import_file(bytes: &[u8], output: &mut Output<'_>) -> Result<(), ForeignError> {
    match (number(bytes, 4), number(bytes, 8)) {
        (Some(1), Some(n_expert)) => output.model_info(&ModelInfo {
            n_expert: Some(n_expert).filter(|&n| n > 0),
            ..ModelInfo::default()
        })?,
        (Some(version), Some(_)) => {
            return Err(output.version(Location::Byte(4), version, "1"));
        }
        _ => return Err(output.invalid(Location::Byte(4), MboltError::Header)),
    }
    let mut passes = Passes::default();
    let (mut offset, mut record) = (HEADER, 0);
    while offset < bytes.len() {
        let at = || Location::Record {
            record,
            offset: offset as u64,
        };
        let Some(entry) =
            Entry::read(&bytes[offset..]).map_err(|error| output.invalid(at(), error))?
        else {
            output.note(format!(
                "the file is truncated; skipped its incomplete last record {record} at byte {offset}"
            ));
            break;
        };
        let layer_id = output.layer_id(at, entry.layer.into())?;
        let first = passes.layer(layer_id, entry.n_tokens);
        for (token_id, experts) in (first.0..)
            .map(TokenId)
            .zip(entry.ids.chunks_exact(4 * entry.k))
        {
            let row = RoutingRow {
                token_id,
                ..RoutingRow::at_layer(layer_id)
            };
            let (experts, _) = experts.as_chunks::<4>();
            let experts = experts
                .iter()
                .map(|&id| (i32::from_le_bytes(id).into(), None));
            output.token(at, &row, experts)?;
        }
        offset += 12 + entry.ids.len();
        record += 1;
    }
    Ok(())
}

/// A record: one layer of a pass.
struct Entry<'a> {
    layer: u32,
    k: usize,
    n_tokens: u32,
    /// Expert ids `[n_tokens, k]`, i32.
    ids: &'a [u8],
}

impl<'a> Entry<'a> {
    /// Reads the record at the start of `bytes`; `None` if it is truncated.
    fn read(bytes: &'a [u8]) -> Result<Option<Self>, MboltError> {
        let (Some(layer), Some(k), Some(n_tokens)) =
            (number(bytes, 0), number(bytes, 4), number(bytes, 8))
        else {
            return Ok(None);
        };
        if layer >= MAX_ID || !(1..MAX_ID).contains(&k) || i32::try_from(n_tokens).is_err() {
            return Err(MboltError::Record { layer, k, n_tokens });
        }
        let k = k as usize;
        let size = k
            .checked_mul(n_tokens as usize)
            .and_then(|n| n.checked_mul(4));
        let ids = size.and_then(|size| bytes[12..].get(..size));
        Ok(ids.map(|ids| Self {
            layer,
            k,
            n_tokens,
            ids,
        }))
    }
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u32::from_le_bytes(*bytes))
}
