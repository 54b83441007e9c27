//! Model architectures. Each has a file that declares its hyper-parameters, tensors and layers as data for one decoder.

mod afmoe;
mod arctic;
mod bailingmoe2;
mod cohere2moe;
mod dbrx;
pub mod decoder;
mod deepseek2;
mod deepseek2_ocr;
mod dots1;
mod ernie4_5_moe;
mod exaone_moe;
mod gemma4;
mod glm4moe;
mod gpt_oss;
mod granitehybrid;
mod granitemoe;
mod grok;
mod hunyuan_moe;
mod kimi_linear;
mod lfm2moe;
mod llama;
mod llama4;
mod mellum;
mod mimo2;
mod minimax_m2;
mod nemotron_h_moe;
mod olmoe;
mod phimoe;
mod qwen2moe;
mod qwen35moe;
mod qwen3moe;
mod qwen3next;
mod smallthinker;
mod step35;

use crate::error::{Error, Result};
use crate::hparams::Keys;
use crate::weights::Loader;

use decoder::Decoder;

type Load = for<'g> fn(&Loader<'g>, &Keys) -> Result<Decoder<'g>>;

/// All architectures: the value of `general.architecture`, and how it is loaded.
const ARCHITECTURES: &[(&str, Load)] = &[
    ("afmoe", afmoe::load),
    ("arctic", arctic::load),
    ("bailingmoe2", bailingmoe2::load),
    ("cohere2moe", cohere2moe::load),
    ("dbrx", dbrx::load),
    ("deepseek2", deepseek2::load),
    ("deepseek2-ocr", deepseek2_ocr::load),
    ("dots1", dots1::load),
    ("ernie4_5-moe", ernie4_5_moe::load),
    ("exaone-moe", exaone_moe::load),
    ("gemma4", gemma4::load),
    ("glm4moe", glm4moe::load),
    ("gpt-oss", gpt_oss::load),
    ("granitehybrid", granitehybrid::load),
    ("granitemoe", granitemoe::load),
    ("grok", grok::load),
    ("hunyuan-moe", hunyuan_moe::load),
    ("kimi-linear", kimi_linear::load),
    ("lfm2moe", lfm2moe::load),
    ("llama", llama::load),
    ("llama4", llama4::load),
    ("mellum", mellum::load),
    ("mimo2", mimo2::load),
    ("minimax-m2", minimax_m2::load),
    ("mistral4", deepseek2::load),
    ("nemotron_h_moe", nemotron_h_moe::load),
    ("olmoe", olmoe::load),
    ("phimoe", phimoe::load),
    ("qwen2moe", qwen2moe::load),
    ("qwen35moe", qwen35moe::load),
    ("qwen3moe", qwen3moe::load),
    ("qwen3next", qwen3next::load),
    ("smallthinker", smallthinker::load),
    ("step35", step35::load),
];

/// Names of the supported architectures, sorted: the values of `general.architecture`.
pub fn names() -> impl Iterator<Item = &'static str> {
    ARCHITECTURES.iter().map(|(name, _)| *name)
}

pub(crate) fn find(loader: &Loader) -> Result<Load> {
    let found = ARCHITECTURES.iter().find(|(name, _)| *name == loader.arch);
    found
        .map(|(_, load)| *load)
        .ok_or_else(|| Error::Architecture {
            file: loader.file(),
            arch: loader.arch.clone(),
            supported: names().collect::<Vec<_>>().join(", "),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted() {
        assert!(names().is_sorted());
    }

    /// The table of the documentation contains the same architectures, in this order.
    #[test]
    fn every_architecture_is_documented() {
        let path = moe_testkit::repository("docs/model-architectures.md");
        let page = std::fs::read_to_string(path).unwrap();
        let first = page.lines().take_while(|line| !line.starts_with("## "));
        let rows = first.filter_map(|line| line.strip_prefix("| `"));
        let rows = rows.map(|row| row.split('`').next().unwrap_or(row));
        assert_eq!(rows.collect::<Vec<_>>(), names().collect::<Vec<_>>());
    }
}
