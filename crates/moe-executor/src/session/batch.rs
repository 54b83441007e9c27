//! Several sequences in a session: slots of the KV cache, and passes over tokens of several sequences.

use moe_engine::{BatchEntry, BatchSession, Observer, TokenSequence};
use moe_placement::perf::SharedCounters;

use super::Session;
use crate::error::{Error, Result};
use crate::kv_cache::Run;

impl BatchSession for Session<'_, '_> {
    fn n_slots(&self) -> usize {
        self.cache.n_seq()
    }

    fn n_ctx(&self) -> usize {
        self.cache.capacity()
    }

    fn n_vocab(&self) -> usize {
        self.model.hparams().n_vocab
    }

    fn is_eog(&self, token: u32) -> bool {
        self.model.tokenizer().is_eog(token)
    }

    fn slot_len(&self, slot: usize) -> moe_engine::Result<usize> {
        Ok(self.cache.len(self.existing(slot)?))
    }

    fn begin_slot(&mut self, slot: usize, sequence_id: u32) -> moe_engine::Result<()> {
        let slot = self.existing(slot)?;
        self.sequence_ids[slot] = sequence_id;
        self.cache.clear(slot);
        Ok(())
    }

    fn truncate_slot(&mut self, slot: usize, n_past: usize) -> moe_engine::Result<()> {
        let slot = self.existing(slot)?;
        Ok(self.cache.truncate(slot, n_past)?)
    }

    /// The slot that [`Session::select_slot`] selects does not change.
    fn decode_batch(&mut self, entries: &[BatchEntry]) -> moe_engine::Result<&[f32]> {
        let n_positions = self.check_batch(entries)?;
        let (ops, s) = (&mut self.ops, &mut self.state);
        ops.positions.clear();
        let positions = entries.iter().map(|entry| entry.position as u32);
        ops.positions.extend(positions);
        ops.sequences.clear();
        let sequences = entries.iter().map(|entry| TokenSequence {
            id: self.sequence_ids[entry.slot],
            phase: entry.phase,
        });
        ops.sequences.extend(sequences);
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
        self.pass(runs, n_positions)?;
        self.check_finite()?;
        Ok(if has_logits {
            self.state.logits.data()
        } else {
            &[]
        })
    }

    fn set_observer(&mut self, observer: Option<Observer<'static>>) {
        self.ops.batch_observer.set(observer);
    }

    fn counters(&self) -> Option<SharedCounters> {
        Session::counters(self)
    }
}

impl Session<'_, '_> {
    /// The slot, if it exists.
    pub(super) fn existing(&self, slot: usize) -> Result<usize> {
        let n_slots = self.cache.n_seq();
        if slot < n_slots {
            return Ok(slot);
        }
        Err(Error::SlotOutOfRange { slot, n_slots })
    }

    /// Checks a batch. Returns the number of positions of its longest sequence after it.
    fn check_batch(&self, entries: &[BatchEntry]) -> moe_engine::Result<usize> {
        let hp = self.model.hparams();
        let context_full = |tokens| moe_engine::Error::ContextFull {
            tokens,
            context: self.cache.capacity(),
            trained: hp.n_ctx_train,
        };
        if entries.is_empty() {
            return Err(context_full(0));
        }
        let mut ends: Vec<usize> = (0..self.cache.n_seq())
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
        Ok(ends.into_iter().max().unwrap_or(0))
    }
}
