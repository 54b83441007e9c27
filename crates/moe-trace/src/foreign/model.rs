//! What a model's file tells about traces of it.

use moe_gguf::experts::{expert_bytes, expert_bytes_by_layer};
use moe_gguf::map::OffsetMap;
use moe_gguf::{Gguf, PerLayer};

use super::rows::Facts;

impl Facts {
    /// What `gguf`, opened from `path`, says. A layer whose experts differ in size has no size of an expert; a number of
    /// selected experts that differs between layers is unknown, and of numbers of experts the largest counts.
    ///
    /// # Errors
    /// A key of the header has another type than it should.
    pub fn of_model(path: &str, gguf: &Gguf) -> Result<Facts, moe_gguf::Error> {
        let metadata = gguf.metadata();
        let arch = metadata.str("general.architecture")?.map(str::to_owned);
        let key = |name: &str, one: fn(&PerLayer) -> Option<u64>| {
            let Some(arch) = &arch else { return Ok(None) };
            let values = metadata.per_layer(&format!("{arch}.{name}"))?;
            let number = values.as_ref().and_then(one);
            Ok::<_, moe_gguf::Error>(number.and_then(|n| u32::try_from(n).ok()))
        };
        let map = OffsetMap::new(gguf);
        Ok(Facts {
            model: Some(path.to_owned()),
            n_layer: key("block_count", PerLayer::uniform)?,
            n_nextn_layer: key("nextn_predict_layers", PerLayer::uniform)?.unwrap_or(0),
            n_expert: key("expert_count", PerLayer::max)?.filter(|&n| n > 0),
            n_expert_used: key("expert_used_count", PerLayer::uniform_nonzero)?,
            moe_layers: expert_bytes(&map)
                .into_keys()
                .map(|(layer, _)| layer)
                .collect(),
            expert_bytes: expert_bytes_by_layer(&map),
            arch,
        })
    }
}
