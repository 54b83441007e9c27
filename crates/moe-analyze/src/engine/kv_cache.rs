//! Options of the KV cache.

use moe_executor::hparams::HParams;
use moe_executor::{CacheParams, CacheType};
use moe_files::text::counted;
use moe_gguf::kv_cache::KvTypes;
use moe_trace::manifest;

use crate::output::human_bytes;

/// Options of the KV cache.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct CacheArgs {
    /// Type of the keys in the KV cache: f32, f16 or q8_0; short name: -ctk
    #[arg(
        long,
        visible_alias = "ctk",
        value_name = "TYPE",
        default_value_t,
        help_heading = "KV cache"
    )]
    pub cache_type_k: CacheType,
    /// Type of the values in the KV cache: f32, f16 or q8_0; short name: -ctv
    #[arg(
        long,
        visible_alias = "ctv",
        value_name = "TYPE",
        default_value_t,
        help_heading = "KV cache"
    )]
    pub cache_type_v: CacheType,
}

impl CacheArgs {
    /// Returns the cache of a session with a context of `n_ctx` positions, of which sequences use `n_positions`.
    pub fn params(self, n_ctx: usize, n_positions: usize) -> CacheParams {
        CacheParams {
            n_positions: n_positions.min(n_ctx),
            k: self.cache_type_k,
            v: self.cache_type_v,
            ..CacheParams::new(n_ctx)
        }
    }

    /// Returns the types of keys and values as tensor types.
    pub fn types(self) -> KvTypes {
        KvTypes {
            k: self.cache_type_k.ggml(),
            v: self.cache_type_v.ggml(),
        }
    }
}

/// Returns the description of a cache for the manifest.
pub fn describe(params: &CacheParams, hp: &HParams) -> manifest::KvCache {
    manifest::KvCache {
        type_k: params.k.name().to_owned(),
        type_v: params.v.name().to_owned(),
        n_seq: Some(params.n_seq as u64),
        n_positions: Some(params.n_positions as u64),
        size_bytes: Some(params.size_bytes(hp, params.n_positions)),
        state_bytes: Some(params.state_bytes(hp)).filter(|&bytes| bytes > 0),
    }
}

/// Returns a line about a cache, before it is allocated.
pub fn note(cache: &manifest::KvCache) -> String {
    let size = cache.size_bytes.map(human_bytes);
    let positions = counted(cache.n_positions.unwrap_or(0), "position");
    let positions = match cache.n_seq {
        Some(n @ 2..) => format!("{n} sequences of {positions} each"),
        _ => positions,
    };
    let state = cache.state_bytes.map_or(String::new(), |bytes| {
        format!("; recurrent states: {}", human_bytes(bytes))
    });
    format!(
        "KV cache: {}, keys {}, values {}, {positions}{state}",
        size.as_deref().unwrap_or("unknown size"),
        cache.type_k,
        cache.type_v
    )
}
