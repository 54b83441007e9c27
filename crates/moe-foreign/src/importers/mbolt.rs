//! The binary log of `mbolt`: 32-bit numbers, little-endian.
//!
//! Magic `MBLT`, version 1, experts in a layer; then a record for each layer of each pass, in the order of the graph: layer, k,
//! tokens, and k experts for each token. A pass ends where the layer does not go up. A pass that only wants the output of some
//! tokens, as that of a prompt, routes fewer of them in its last layer.

use moe_trace::{Facts, MAX_ID, RoutingRow, TokenId};

use crate::binary::mapped::Mapped;
use crate::passes::Passes;
use crate::{At, ForeignError, ImportOptions, Importer, Output, Source};

const MAGIC: u32 = 0x544C_424D;
const HEADER: usize = 12;

/// Why a log is refused.
#[derive(Debug, thiserror::Error)]
enum MboltFault {
    #[error("the header is cut off")]
    Header,
    #[error("version {version} of the log is not known (1 is)")]
    Version { version: u32 },
    #[error(
        "layer {layer} with {k} experts for each of {n_tokens} tokens makes no sense; the file is damaged"
    )]
    Record { layer: u32, k: u32, n_tokens: u32 },
}

/// Log of mbolt.
pub struct Mbolt;

impl Importer for Mbolt {
    fn name(&self) -> &'static str {
        "mbolt"
    }

    fn description(&self) -> &'static str {
        "binary routing log of mbolt: every expert of every token, in order"
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
        output.note("the log contains neither phases nor router weights");
        Ok(())
    }
}

fn import_file(bytes: &[u8], output: &mut Output<'_>) -> Result<(), ForeignError> {
    match (number(bytes, 4), number(bytes, 8)) {
        (Some(1), Some(n_expert)) => output.facts(&Facts {
            n_expert: Some(n_expert).filter(|&n| n > 0),
            ..Facts::default()
        })?,
        (Some(version), Some(_)) => {
            return Err(output.invalid(At::Byte(4), MboltFault::Version { version }));
        }
        _ => return Err(output.invalid(At::Byte(4), MboltFault::Header)),
    }
    let mut passes = Passes::default();
    let (mut offset, mut record) = (HEADER, 0);
    while offset < bytes.len() {
        let at = || At::Record {
            record,
            offset: offset as u64,
        };
        let Some(entry) =
            Entry::read(&bytes[offset..]).map_err(|fault| output.invalid(at(), fault))?
        else {
            output.note(format!(
                "the last record, {record} at byte {offset}, is cut off and was left out"
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

/// A layer of a pass.
struct Entry<'a> {
    layer: u32,
    k: usize,
    n_tokens: u32,
    /// `[n_tokens][k]`
    ids: &'a [u8],
}

impl<'a> Entry<'a> {
    /// Reads the record that `bytes` begin with; `None` if it is cut off.
    fn read(bytes: &'a [u8]) -> Result<Option<Self>, MboltFault> {
        let (Some(layer), Some(k), Some(n_tokens)) =
            (number(bytes, 0), number(bytes, 4), number(bytes, 8))
        else {
            return Ok(None);
        };
        if layer >= MAX_ID || !(1..MAX_ID).contains(&k) || i32::try_from(n_tokens).is_err() {
            return Err(MboltFault::Record { layer, k, n_tokens });
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
