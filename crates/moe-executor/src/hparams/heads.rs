//! Numbers and widths of the attention heads, by layer.

use moe_gguf::LayerId;

use super::{Keys, Layout};
use crate::error::Result;

/// Maximum number of heads of a layer, and maximum width of a head.
pub(super) const MAX_HEADS: usize = 1 << 14;

const N: &str = "attention.head_count";
const N_KV: &str = "attention.head_count_kv";

/// The attention heads of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub n: usize,
    /// Key and value heads; `n` is a multiple of it. 0 in a layer that has no attention in the header.
    pub n_kv: usize,
    /// Width of a query or a key, elements.
    pub k_dim: usize,
    /// Width of a value, elements.
    pub v_dim: usize,
    /// The layer whose keys and values the attention reads. If it is another layer than this one, this one computes none.
    pub kv_layer: LayerId,
}

impl Heads {
    /// Elements of the queries of a token.
    pub fn n_q(&self) -> usize {
        self.n * self.k_dim
    }

    /// Elements of the keys of a token.
    pub fn n_k(&self) -> usize {
        self.n_kv * self.k_dim
    }

    /// Elements of the values of a token.
    pub fn n_v(&self) -> usize {
        self.n_kv * self.v_dim
    }

    /// Elements of the output of the heads of a token.
    pub fn n_out(&self) -> usize {
        self.n * self.v_dim
    }

    /// Elements of the keys and of the values of a position in the cache of layer `il`, whose heads these are: 0 if it reads the cache of
    /// another layer.
    pub fn cache_widths(&self, il: LayerId) -> [usize; 2] {
        if self.kv_layer == il {
            [self.n_k(), self.n_v()]
        } else {
            [0; 2]
        }
    }

    /// Reads the heads of all layers. The widths are those of layers without a sliding window.
    ///
    /// # Errors
    /// A key is missing or out of range, or its values differ between layers although `layout` does not allow it.
    pub(super) fn read(
        keys: &Keys,
        layout: &Layout,
        n_layer: usize,
        n_embd: usize,
    ) -> Result<Vec<Heads>> {
        const KEY_LENGTH: &str = "attention.key_length";
        const VALUE_LENGTH: &str = "attention.value_length";
        let all: Vec<usize> = (0..n_layer).collect();
        let n = if layout.heads_by_layer {
            keys.counts(N, &all, n_layer, MAX_HEADS)?
        } else {
            vec![keys.count(N, MAX_HEADS)?; n_layer]
        };
        let first = n.first().copied().unwrap_or(1);
        let n_kv = if layout.heads_by_layer {
            let n_kv = keys.opt_counts(N_KV, &all, n_layer, MAX_HEADS)?;
            n_kv.unwrap_or_else(|| n.clone())
        } else {
            read_kv(keys, layout, n_layer, first)?
        };
        let k_dim = keys.count_or(KEY_LENGTH, n_embd / first, MAX_HEADS)?;
        let default = if layout.own_value_length {
            n_embd / first
        } else {
            k_dim
        };
        let v_dim = keys.count_or(VALUE_LENGTH, default, MAX_HEADS)?;
        if v_dim != k_dim && !layout.own_value_length {
            let reason = format!("it must equal the key length, {k_dim}");
            return Err(keys.bad(VALUE_LENGTH, v_dim, &reason));
        }
        let mut heads = Vec::with_capacity(n_layer);
        let counts = n.into_iter().zip(n_kv);
        for (kv_layer, (n, n_kv)) in (0..).map(LayerId).zip(counts) {
            if n_kv > n || !n.is_multiple_of(n_kv.max(1)) {
                let reason = format!("`{N}` of layer {kv_layer}, {n}, must be a multiple of it");
                return Err(keys.bad(N_KV, n_kv, &reason));
            }
            heads.push(Heads {
                n,
                n_kv,
                k_dim,
                v_dim,
                kv_layer,
            });
        }
        Ok(heads)
    }
}

/// The number of key and value heads by layer: the same in all layers, or 0 in some of them if the layout allows it.
fn read_kv(keys: &Keys, layout: &Layout, n_layer: usize, n: usize) -> Result<Vec<usize>> {
    let values = match keys.values(N_KV)? {
        Some(values) if layout.layers_without_heads => values,
        _ => return Ok(vec![keys.count_or(N_KV, n, n)?; n_layer]),
    };
    let heads = (0..n_layer).map(|layer| values.get(layer).unwrap_or(0));
    let heads = heads.map(|n| usize::try_from(n).unwrap_or(usize::MAX));
    let heads: Vec<usize> = heads.collect();
    let mut with_heads = heads.iter().filter(|&&n| n > 0);
    let first = with_heads.next().copied().unwrap_or(1);
    if with_heads.any(|&n| n != first) {
        let reason = "layers with attention must have the same number of heads";
        return Err(keys.bad(N_KV, values, reason));
    }
    Ok(heads)
}
