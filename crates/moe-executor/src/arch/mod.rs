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

/// An architecture that the executor runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Architecture {
    /// Value of `general.architecture`.
    pub name: &'static str,
    /// Whether all operations have a GPU kernel.
    pub runs_on_gpu: bool,
}

/// All operations have a GPU kernel.
const GPU: bool = true;
/// An operation has no GPU kernel.
const CPU: bool = false;

/// All architectures: the value of `general.architecture`, where it runs, and how it is loaded.
const ARCHITECTURES: &[(&str, bool, Load)] = &[
    ("afmoe", GPU, afmoe::load),
    ("arctic", GPU, arctic::load),
    ("bailingmoe2", GPU, bailingmoe2::load),
    ("cohere2moe", GPU, cohere2moe::load),
    ("dbrx", GPU, dbrx::load),
    ("deepseek2", GPU, deepseek2::load),
    ("deepseek2-ocr", GPU, deepseek2_ocr::load),
    ("dots1", GPU, dots1::load),
    ("ernie4_5-moe", GPU, ernie4_5_moe::load),
    ("exaone-moe", GPU, exaone_moe::load),
    ("gemma4", GPU, gemma4::load),
    ("glm4moe", GPU, glm4moe::load),
    ("gpt-oss", GPU, gpt_oss::load),
    ("granitehybrid", GPU, granitehybrid::load),
    ("granitemoe", GPU, granitemoe::load),
    ("grok", GPU, grok::load),
    ("hunyuan-moe", GPU, hunyuan_moe::load),
    ("kimi-linear", CPU, kimi_linear::load),
    ("lfm2moe", GPU, lfm2moe::load),
    ("llama", GPU, llama::load),
    ("llama4", GPU, llama4::load),
    ("mellum", GPU, mellum::load),
    ("mimo2", GPU, mimo2::load),
    ("minimax-m2", GPU, minimax_m2::load),
    ("mistral4", GPU, deepseek2::load),
    ("nemotron_h_moe", GPU, nemotron_h_moe::load),
    ("olmoe", GPU, olmoe::load),
    ("phimoe", GPU, phimoe::load),
    ("qwen2moe", GPU, qwen2moe::load),
    ("qwen35moe", GPU, qwen35moe::load),
    ("qwen3moe", GPU, qwen3moe::load),
    ("qwen3next", GPU, qwen3next::load),
    ("smallthinker", GPU, smallthinker::load),
    ("step35", GPU, step35::load),
];

/// The supported architectures, sorted by name.
pub fn supported() -> impl Iterator<Item = Architecture> {
    let architectures = ARCHITECTURES.iter();
    architectures.map(|&(name, runs_on_gpu, _)| Architecture { name, runs_on_gpu })
}

/// Names of the supported architectures.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    supported().map(|architecture| architecture.name)
}

pub(crate) fn find(loader: &Loader) -> Result<Load> {
    let found = ARCHITECTURES
        .iter()
        .find(|(name, _, _)| *name == loader.arch);
    found
        .map(|(_, _, load)| *load)
        .ok_or_else(|| Error::Architecture {
            file: loader.file(),
            arch: loader.arch.clone(),
            supported: names().collect::<Vec<_>>().join(", "),
        })
}

#[cfg(test)]
mod tests {
    use moe_gguf::{GgmlType, Gguf};
    use moe_synth::model::{Description, Synth};

    use super::*;
    use crate::model::Model;

    /// A model of an architecture: generated from its description, or a fixture.
    fn small_model(arch: &str) -> Gguf {
        let description = moe_testkit::fixture(format!("architectures/{arch}.json"));
        if !description.exists() {
            return Gguf::open(moe_testkit::fixture(format!("random-{arch}-F16.gguf"))).unwrap();
        }
        let json = std::fs::read(description).unwrap();
        let description: Description = serde_json::from_slice(&json).unwrap();
        let synth = Synth::described(&description, GgmlType::F16, 5).unwrap();
        Gguf::from_bytes(arch, synth.write(Vec::new()).unwrap()).unwrap()
    }

    #[test]
    fn names_are_sorted() {
        assert!(names().is_sorted());
    }

    #[test]
    fn architectures_on_gpus_have_all_kernels() {
        for architecture in supported() {
            let gguf = small_model(architecture.name);
            let model = Model::load(&gguf).unwrap();
            let missing = model.decoder.without_kernel();
            assert_eq!(
                missing.is_none(),
                architecture.runs_on_gpu,
                "{architecture:?}"
            );
        }
    }

    /// The table of the documentation contains the same architectures, in this order.
    #[test]
    fn every_architecture_is_documented() {
        let path = moe_testkit::repository("docs/model-architectures.md");
        let page = std::fs::read_to_string(path).unwrap();
        let first = page.lines().take_while(|line| !line.starts_with("## "));
        let rows = first.filter(|line| line.starts_with("| `"));
        let rows: Vec<(String, &str)> = rows
            .map(|line| {
                let cells: Vec<&str> = line.split('|').map(str::trim).collect();
                (cells[1].replace('`', ""), cells[3])
            })
            .collect();
        let expected = supported().map(|architecture| {
            let gpu = if architecture.runs_on_gpu {
                "yes"
            } else {
                "no"
            };
            (architecture.name.to_owned(), gpu)
        });
        assert_eq!(rows, expected.collect::<Vec<_>>());
    }
}
