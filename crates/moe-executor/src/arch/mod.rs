//! Model architectures. Each has a file that declares its hyper-parameters, tensors and layers as data for one decoder.

mod afmoe;
mod arctic;
mod bailingmoe2;
mod dbrx;
pub mod decoder;
mod dots1;
mod ernie4_5_moe;
mod exaone_moe;
mod glm4moe;
mod gpt_oss;
mod granitemoe;
mod grok;
mod hunyuan_moe;
mod llama;
mod mellum;
mod minimax_m2;
mod olmoe;
mod phimoe;
mod qwen2moe;
mod qwen3moe;
mod smallthinker;

use crate::error::{Error, Result};
use crate::hparams::Keys;
use crate::weights::Loader;

use decoder::Decoder;

type Load = for<'g> fn(&Loader<'g>, &Keys) -> Result<Decoder<'g>>;

/// All architectures, by the value of `general.architecture`.
const ARCHITECTURES: &[(&str, Load)] = &[
    ("afmoe", afmoe::load),
    ("arctic", arctic::load),
    ("bailingmoe2", bailingmoe2::load),
    ("dbrx", dbrx::load),
    ("dots1", dots1::load),
    ("ernie4_5-moe", ernie4_5_moe::load),
    ("exaone-moe", exaone_moe::load),
    ("glm4moe", glm4moe::load),
    ("gpt-oss", gpt_oss::load),
    ("granitemoe", granitemoe::load),
    ("grok", grok::load),
    ("hunyuan-moe", hunyuan_moe::load),
    ("llama", llama::load),
    ("mellum", mellum::load),
    ("minimax-m2", minimax_m2::load),
    ("olmoe", olmoe::load),
    ("phimoe", phimoe::load),
    ("qwen2moe", qwen2moe::load),
    ("qwen3moe", qwen3moe::load),
    ("smallthinker", smallthinker::load),
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
