//! Model architectures: one file each, declaring hyper-parameters, tensors and the layer.

pub mod gpt_oss;
pub mod qwen3moe;

use crate::activation::{Activation, NodeName};
use crate::error::{Error, Result};
use crate::hparams::HParams;
use crate::kv_cache::KvCache;
use crate::moe::MoeState;
use crate::ops::Ops;
use crate::weights::Loader;

/// One architecture with its weights loaded.
pub trait Architecture: Send + Sync {
    /// Where a prompt is cut to the rows whose logits are wanted.
    fn cut(&self) -> Cut;

    /// Runs layer `il` on the residual stream `state.x`. When the prompt is cut inside this layer, `state.wanted` is
    /// the rows to keep.
    fn layer(&self, il: usize, ops: &mut Ops, state: &mut State, cache: &mut KvCache);

    /// Records of one layer: operations with one record a pass, and operations with one record a token.
    fn ops_per_layer(&self) -> (usize, usize);
}

/// Where llama.cpp cuts a prompt to the rows whose logits are wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cut {
    /// In the last layer, between attention and experts.
    InLastLayer,
    /// Behind the last layer.
    BehindLastLayer,
}

/// Buffers of a pass, shared by all layers.
pub struct State {
    /// Residual stream `(token, n_embd)`.
    pub x: Activation,
    /// Normed input of a block `(token, n_embd)`.
    pub normed: Activation,
    /// Queries `(token, n_head * head_dim)`.
    pub q: Activation,
    /// Keys `(token, n_head_kv * head_dim)`.
    pub k: Activation,
    /// Values `(token, n_head_kv * head_dim)`.
    pub v: Activation,
    /// Normed queries or keys, where the architecture has that norm.
    pub qk_normed: Activation,
    /// Output of the heads `(token, n_head * head_dim)`.
    pub heads: Activation,
    /// Output of attention, later of the experts `(token, n_embd)`.
    pub block: Activation,
    /// Residual stream between attention and experts `(token, n_embd)`.
    pub ffn_inp: Activation,
    /// Scratch for rows that are kept.
    pub kept: Activation,
    /// Logits `(wanted, n_vocab)`.
    pub logits: Activation,
    /// Buffers of the experts.
    pub moe: MoeState,
    /// Rows whose logits are wanted.
    pub wanted: Vec<u32>,
}

impl Default for State {
    fn default() -> Self {
        let mut id = 0;
        let mut next = || {
            id += 1;
            Activation::new(id)
        };
        State {
            x: next(),
            normed: next(),
            q: next(),
            k: next(),
            v: next(),
            qk_normed: next(),
            heads: next(),
            block: next(),
            ffn_inp: next(),
            kept: next(),
            logits: next(),
            moe: MoeState::new(64),
            wanted: Vec::new(),
        }
    }
}

impl State {
    /// Cuts attention's output and the residual stream to the wanted rows, as llama.cpp does in the last layer.
    pub fn cut_rows(&mut self, il: usize, ops: &mut Ops) {
        let wanted = std::mem::take(&mut self.wanted);
        let positions: Vec<u32> = wanted
            .iter()
            .map(|&row| ops.positions[row as usize])
            .collect();
        ops.positions = positions;
        ops.get_rows(
            NodeName::of("attn_out_rows", il),
            &self.block,
            &wanted,
            &mut self.kept,
        );
        std::mem::swap(&mut self.block, &mut self.kept);
        ops.get_rows(
            NodeName::of("l_out_rows", il),
            &self.x,
            &wanted,
            &mut self.kept,
        );
        std::mem::swap(&mut self.x, &mut self.kept);
        self.wanted = wanted;
    }
}

type Load = for<'g> fn(&Loader<'g>, &HParams) -> Result<Box<dyn Architecture + 'g>>;

/// Every architecture by its name in `general.architecture`.
const ARCHITECTURES: &[(&str, Load)] = &[("gpt-oss", gpt_oss::load), ("qwen3moe", qwen3moe::load)];

/// Names of the architectures that can be run.
pub fn supported() -> impl Iterator<Item = &'static str> {
    ARCHITECTURES.iter().map(|(name, _)| *name)
}

pub(crate) fn find(loader: &Loader) -> Result<Load> {
    let found = ARCHITECTURES.iter().find(|(name, _)| *name == loader.arch);
    found
        .map(|(_, load)| *load)
        .ok_or_else(|| Error::Architecture {
            file: loader.file(),
            arch: loader.arch.clone(),
            supported: supported().collect::<Vec<_>>().join(" and "),
        })
}
