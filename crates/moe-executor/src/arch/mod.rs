//! Model architectures. Each has a file that declares its hyper-parameters, tensors and layers as data for one decoder.

pub mod decoder;
mod dots1;
mod gpt_oss;
mod llama;
mod olmoe;
mod qwen2moe;
mod qwen3moe;

use crate::error::{Error, Result};
use crate::hparams::Keys;
use crate::weights::Loader;

use decoder::Decoder;

type Load = for<'g> fn(&Loader<'g>, &Keys) -> Result<Decoder<'g>>;

/// All architectures, by the value of `general.architecture`.
const ARCHITECTURES: &[(&str, Load)] = &[
    ("dots1", dots1::load),
    ("gpt-oss", gpt_oss::load),
    ("llama", llama::load),
    ("olmoe", olmoe::load),
    ("qwen2moe", qwen2moe::load),
    ("qwen3moe", qwen3moe::load),
];

/// Names of the supported architectures.
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
            supported: supported().collect::<Vec<_>>().join(", "),
        })
}
