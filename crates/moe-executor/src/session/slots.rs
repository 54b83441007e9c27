//! Several sequences in a session: slots of the KV cache, and passes over tokens of several sequences.

use moe_trace::Phase;

use super::Session;
use crate::error::{Error, Result};
use crate::kv_cache::Run;

/// A token of [`Session::decode_batch`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchEntry {
    /// The slot of its sequence.
    pub slot: usize,
    /// Token id.
    pub token: u32,
    /// Its position: the number of tokens before it in its sequence.
    pub position: usize,
    /// Whether its logits are wanted.
    pub logits: bool,
}

impl Session<'_, '_> {
    /// Number of slots of the cache.
    pub fn n_slots(&self) -> usize {
        self.cache.n_seq()
    }

    /// Selects the slot whose sequence the following passes continue.
    ///
    /// # Errors
    /// [`Error::SlotOutOfRange`].
    pub fn select_slot(&mut self, slot: usize) -> Result<()> {
        self.slot = self.existing(slot)?;
        Ok(())
    }

    /// Removes the positions of a slot's sequence from `n_past` on, so that another continuation can reuse the positions before
    /// it.
    ///
    /// # Errors
    /// [`Error::SlotOutOfRange`].
    pub fn truncate_slot(&mut self, slot: usize, n_past: usize) -> Result<()> {
        let slot = self.existing(slot)?;
        self.cache.truncate(slot, n_past);
        Ok(())
    }

    fn existing(&self, slot: usize) -> Result<usize> {
        let n_slots = self.n_slots();
        if slot < n_slots {
            return Ok(slot);
        }
        Err(Error::SlotOutOfRange { slot, n_slots })
    }

    /// Number of positions of a slot's sequence.
    ///
    /// # Errors
    /// [`Error::SlotOutOfRange`].
    pub fn slot_len(&self, slot: usize) -> Result<usize> {
        Ok(self.cache.len(self.existing(slot)?))
    }

    /// Evaluates tokens of one phase of several sequences in one pass. Each token follows the tokens before it in the cache and in
    /// the batch. Returns the logits `(wanted, n_vocab)` of the entries whose logits are wanted, in their order. The selected slot
    /// does not change.
    ///
    /// # Errors
    /// A slot or token is out of range, a position does not follow the previous ones, the context is full, the batch has several
    /// sequences and the session records, or results are not finite.
    pub fn decode_batch(
        &mut self,
        entries: &[BatchEntry],
        phase: Phase,
    ) -> moe_engine::Result<&[f32]> {
        let n_positions = self.check_batch(entries)?;
        let (ops, s) = (&mut self.ops, &mut self.state);
        ops.positions.clear();
        let positions = entries.iter().map(|entry| entry.position as u32);
        ops.positions.extend(positions);
        s.tokens.clear();
        s.tokens.extend(entries.iter().map(|entry| entry.token));
        s.wanted.clear();
        let wanted = (0..).zip(entries).filter(|(_, entry)| entry.logits);
        s.wanted.extend(wanted.map(|(row, _)| row));
        let has_logits = !s.wanted.is_empty();
        let mut end = 0;
        let runs = entries.chunk_by(|a, b| a.slot == b.slot).map(|run| {
            let start = end;
            end += run.len();
            Run {
                sequence: run[0].slot,
                tokens: start..end,
            }
        });
        let selected = std::mem::replace(&mut self.slot, entries[0].slot);
        let evaluated = self.pass(runs, n_positions, phase);
        self.slot = selected;
        evaluated?;
        self.check_finite()?;
        Ok(if has_logits {
            self.state.logits.data()
        } else {
            &[]
        })
    }

    /// Checks a batch. Returns the number of positions of its longest sequence after it.
    fn check_batch(&self, entries: &[BatchEntry]) -> moe_engine::Result<usize> {
        let hp = self.model.hparams();
        let context_full = |tokens| moe_engine::Error::ContextFull {
            tokens,
            context: self.cache.capacity(),
            trained: hp.n_ctx_train,
        };
        let Some(first) = entries.first() else {
            return Err(context_full(0));
        };
        let mut ends: Vec<usize> = (0..self.n_slots())
            .map(|slot| self.cache.len(slot))
            .collect();
        for entry in entries {
            let slot = self.existing(entry.slot)?;
            if entry.position != ends[slot] {
                return Err(moe_engine::Error::from(Error::BatchPosition {
                    slot,
                    position: entry.position,
                    expected: ends[slot],
                }));
            }
            if entry.token as usize >= hp.n_vocab {
                return Err(moe_engine::Error::TokenOutOfRange {
                    token: entry.token,
                    position: entry.position,
                    n_vocab: hp.n_vocab,
                });
            }
            ends[slot] += 1;
            if ends[slot] > self.cache.capacity() {
                return Err(context_full(ends[slot]));
            }
        }
        let is_mixed = entries.iter().any(|entry| entry.slot != first.slot);
        if is_mixed && self.ops.recorder.is_on() {
            return Err(moe_engine::Error::from(Error::RecordedBatch));
        }
        Ok(ends.into_iter().max().unwrap_or(0))
    }
}
