//! What a model's file tells about traces of it.

use std::collections::BTreeMap;

use moe_gguf::Gguf;
use moe_gguf::experts::expert_sizes;

use super::rows::Facts;

impl Facts {
    /// What `gguf`, opened from `path`, says. A layer whose experts differ in size has no size of an expert.
    ///
    /// # Errors
    /// A key of the header has another type than it should.
    pub fn of_model(path: &str, gguf: &Gguf) -> Result<Facts, moe_gguf::Error> {
        let metadata = gguf.metadata();
        let arch = metadata.str("general.architecture")?.map(str::to_owned);
        let key = |name: &str| match &arch {
            Some(arch) => metadata.u32(&format!("{arch}.{name}")),
            None => Ok(None),
        };
        let mut sizes: BTreeMap<u16, Option<u64>> = BTreeMap::new();
        for size in expert_sizes(gguf) {
            let layer = sizes.entry(size.layer).or_insert(Some(size.bytes));
            if *layer != Some(size.bytes) {
                *layer = None;
            }
        }
        Ok(Facts {
            model: Some(path.to_owned()),
            n_layer: key("block_count")?,
            n_expert: key("expert_count")?.filter(|&n| n > 0),
            n_expert_used: key("expert_used_count")?.filter(|&n| n > 0),
            expert_bytes: sizes
                .into_iter()
                .filter_map(|(layer, bytes)| Some((layer, bytes?)))
                .collect(),
            arch,
        })
    }
}
