//! Models of any architecture: a list of header keys and tensors, with random values.

use std::collections::BTreeMap;

use moe_gguf::{Array, GgmlType, Value, ValueType};
use serde::Deserialize;

use super::spec::VocabSpec;
use super::tensors::Fill;
use super::{Error, blocks, keys, vocab};
use crate::write::Header;

/// The header keys and tensors of a model.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// `general.architecture`.
    pub arch: String,
    /// `general.name`. Default: the name of the architecture.
    #[serde(default)]
    pub name: Option<String>,
    /// Type or mix of the weights, like [`super::Spec::quant`]. Default: `F16`.
    #[serde(default = "super::spec::default_quant")]
    pub quant: String,
    /// Keys of the architecture, without its name.
    pub keys: BTreeMap<String, Key>,
    /// Vocabulary.
    pub vocab: VocabSpec,
    /// Shapes of the tensors outside the layers, innermost dimension first.
    pub tensors: BTreeMap<String, Vec<u64>>,
    /// Tensors of ranges of layers.
    pub layers: Vec<LayerTensors>,
    /// Factors on the standard deviation of matrices, by name without the layer. The products of a matrix with a normalized
    /// vector have a standard deviation of about this factor. Default: 1.
    #[serde(default)]
    pub scales: BTreeMap<String, f64>,
}

/// The tensors of consecutive layers.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerTensors {
    /// First layer.
    pub from: u32,
    /// Layer after the last.
    pub to: u32,
    /// The only layers of the range with these tensors. Default: all.
    #[serde(default)]
    pub only: Vec<u32>,
    /// Layers of the range without these tensors. Default: none.
    #[serde(default)]
    pub except: Vec<u32>,
    /// Shapes by name without `blk.N.`, innermost dimension first.
    pub tensors: BTreeMap<String, Vec<u64>>,
}

/// The value of a header key. Numbers with a decimal point are F32, other numbers U32.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum Key {
    /// A flag.
    Bool(bool),
    /// An integer.
    Number(u32),
    /// A floating-point number.
    Float(f32),
    /// A text.
    Text(String),
    /// A flag for each layer.
    Flags(Vec<bool>),
    /// An integer for each layer.
    Numbers(Vec<u32>),
    /// A floating-point number for each layer.
    Floats(Vec<f32>),
}

impl Key {
    fn value(&self) -> Value {
        match self {
            Key::Bool(flag) => Value::Bool(*flag),
            Key::Number(number) => Value::U32(*number),
            Key::Float(number) => Value::F32(*number),
            Key::Text(text) => Value::String(text.clone()),
            Key::Flags(list) => array(ValueType::Bool, list.iter().copied().map(Value::Bool)),
            Key::Numbers(list) => array(ValueType::U32, list.iter().copied().map(Value::U32)),
            Key::Floats(list) => array(ValueType::F32, list.iter().copied().map(Value::F32)),
        }
    }
}

/// Returns an array. All elements must have the type `ty`.
fn array(ty: ValueType, elements: impl IntoIterator<Item = Value>) -> Value {
    Value::Array(Box::new(
        Array::new(ty, elements).expect("all elements have the same type"),
    ))
}

/// The router of a layer.
pub(super) const ROUTER: &str = "ffn_gate_inp.weight";

/// Standard deviation of biases.
const BIAS: f64 = 0.1;

/// Maximum number of layers, the same as that of [`super::Spec`].
pub(super) const MAX_LAYERS: u32 = 1 << 12;

/// A tensor of a description.
pub(super) struct DescribedTensor<'d> {
    /// The layer; `None` for tensors outside the layers.
    pub(super) layer: Option<u32>,
    /// Name without `blk.N.`.
    pub(super) part: &'d str,
    /// Shape, innermost dimension first.
    pub(super) ne: &'d [u64],
}

impl DescribedTensor<'_> {
    /// The name in the file.
    pub(super) fn name(&self) -> String {
        match self.layer {
            Some(layer) => format!("blk.{layer}.{}", self.part),
            None => self.part.to_owned(),
        }
    }

    /// Number of elements of a row.
    pub(super) fn n_in(&self) -> u64 {
        self.ne.first().copied().unwrap_or(1)
    }

    /// Whether the tensor is F32 in every model: a vector, a bias, a router, or a small tensor of a recurrent layer.
    pub(super) fn is_small(&self) -> bool {
        self.ne.len() == 1 || self.part.ends_with(".bias") || is_f32(self.part)
    }
}

impl LayerTensors {
    /// The layers with these tensors.
    fn layers(&self) -> impl Iterator<Item = u32> {
        (self.from..self.to).filter(|layer| self.contains(*layer))
    }

    /// Whether a layer has these tensors.
    fn contains(&self, layer: u32) -> bool {
        (self.from..self.to).contains(&layer)
            && (self.only.is_empty() || self.only.contains(&layer))
            && !self.except.contains(&layer)
    }
}

/// Whether llama.cpp requires F32 for a tensor that may be a matrix, given its name without the layer.
fn is_f32(part: &str) -> bool {
    const SMALL: [&str; 4] = ["shortconv.conv.weight", "ssm_a", "ssm_d", "ssm_norm.weight"];
    let starts = ["ffn_gate_inp", "ssm_conv1d"];
    starts.iter().any(|start| part.starts_with(start)) || SMALL.contains(&part)
}

impl Description {
    /// Sets a header key of the architecture.
    pub fn set(&mut self, key: &str, value: Key) {
        self.keys.insert(key.to_owned(), value);
    }

    /// Replaces the tensors `old` by `new`, with their shapes, in each range of layers that contains one of them.
    pub fn replace_tensors(&mut self, old: &[&str], new: &[(&str, &[u64])]) {
        for range in &mut self.layers {
            let n_before = range.tensors.len();
            range
                .tensors
                .retain(|name, _| !old.contains(&name.as_str()));
            if range.tensors.len() < n_before {
                let new = new.iter();
                range
                    .tensors
                    .extend(new.map(|(name, ne)| ((*name).to_owned(), ne.to_vec())));
            }
        }
    }

    /// Returns the description of a model with the first `n_layer` blocks.
    ///
    /// Lists with a value for each block are truncated. Blocks of an MTP head, which are the last, are removed first.
    ///
    /// # Errors
    /// The model has fewer blocks, or the remaining ones have no experts.
    pub fn with_layers(mut self, n_layer: u32) -> Result<Description, Error> {
        let bad = |problem: String| Error::Spec {
            key: "n_layer",
            problem,
        };
        let Some(Key::Number(n_all)) = self.keys.get("block_count").cloned() else {
            let problem = "`block_count` is missing or not a number".to_owned();
            return Err(Error::Spec {
                key: "keys",
                problem,
            });
        };
        if n_layer == 0 || n_layer > n_all {
            return Err(bad(format!("{n_layer} is out of range (1..={n_all})")));
        }
        let routers = self
            .layers
            .iter()
            .filter(|range| range.tensors.contains_key(ROUTER));
        let first = routers.filter_map(|range| range.layers().min()).min();
        if let Some(first) = first
            && first >= n_layer
        {
            let problem = format!(
                "{n_layer} is out of range ({}..={n_all}); the first layer with experts is {first}",
                first + 1
            );
            return Err(bad(problem));
        }
        if let Some(Key::Number(n_mtp)) = self.keys.get("nextn_predict_layers").cloned() {
            let left = n_mtp.saturating_sub(n_all - n_layer);
            if left == 0 {
                self.keys.remove("nextn_predict_layers");
            } else {
                self.set("nextn_predict_layers", Key::Number(left));
            }
        }
        let (all, some) = (n_all as usize, n_layer as usize);
        for key in self.keys.values_mut() {
            match key {
                Key::Flags(list) if list.len() == all => list.truncate(some),
                Key::Numbers(list) if list.len() == all => list.truncate(some),
                Key::Floats(list) if list.len() == all => list.truncate(some),
                _ => {}
            }
        }
        self.set("block_count", Key::Number(n_layer));
        for range in &mut self.layers {
            range.to = range.to.min(n_layer);
        }
        Ok(self)
    }

    /// Returns a header with the key-values of the model: `general` after the architecture, then all others.
    ///
    /// # Errors
    /// The vocabulary or a key is invalid.
    pub(super) fn header(&self, general: &[(&str, Value)]) -> Result<Header, Error> {
        self.vocab.check()?;
        let mut header = Header::new();
        header.set("general.architecture", &Value::String(self.arch.clone()))?;
        for (key, value) in general {
            header.set(&format!("general.{key}"), value)?;
        }
        for (key, value) in &self.keys {
            header.set(&format!("{}.{key}", self.arch), &value.value())?;
        }
        keys::tokenizer(&mut header, &self.vocab, vocab::vocab(&self.vocab)?)?;
        Ok(header)
    }

    /// Returns all tensors: those outside the layers, then those of each layer.
    ///
    /// # Errors
    /// A range of layers is too large.
    pub(super) fn tensors(&self) -> Result<Vec<DescribedTensor<'_>>, Error> {
        let end = self.layers.iter().map(|range| range.to).max().unwrap_or(0);
        if end > MAX_LAYERS {
            let problem = format!("a range ends at {end}, but at most {MAX_LAYERS} is supported");
            return Err(Error::Spec {
                key: "layers",
                problem,
            });
        }
        let outside = self.tensors.iter().map(|(part, ne)| DescribedTensor {
            layer: None,
            part,
            ne,
        });
        let mut tensors: Vec<_> = outside.collect();
        for layer in 0..end {
            for range in self.layers.iter().filter(|range| range.contains(layer)) {
                tensors.extend(range.tensors.iter().map(|(part, ne)| DescribedTensor {
                    layer: Some(layer),
                    part,
                    ne,
                }));
            }
        }
        Ok(tensors)
    }

    /// Returns the contents of a tensor.
    pub(super) fn fill(&self, tensor: &DescribedTensor<'_>) -> Fill {
        let part = tensor.part;
        let scale = self.scales.get(part).copied();
        match scale {
            None if part.ends_with(".bias") => Fill::Noise(BIAS),
            None if part.contains("norm") || part.starts_with("rope_") => Fill::Norm,
            None if part == "ssm_a" => Fill::Decay,
            scale if tensor.ne.len() == 1 || part.ends_with(".bias") => {
                Fill::Noise(scale.unwrap_or(1.0))
            }
            scale => Fill::Noise(scale.unwrap_or(1.0) / (tensor.n_in() as f64).sqrt()),
        }
    }

    /// Returns the header of the model with matrices of type `ty`, and the contents of its tensors.
    ///
    /// Vectors, biases, routers, the small tensors of recurrent layers, and matrices whose rows are not complete blocks of the type
    /// are F32.
    ///
    /// # Errors
    /// The vocabulary, a tensor or the type is invalid.
    pub(super) fn plan(&self, ty: GgmlType) -> Result<(Header, Vec<Fill>), Error> {
        if !blocks::is_supported(ty) {
            return Err(Error::Quant {
                name: ty.name().to_owned(),
                known: super::Quant::names(),
            });
        }
        let mut header = self.header(&[])?;
        let mut fills = Vec::new();
        for tensor in self.tensors()? {
            let has_blocks = tensor.n_in().is_multiple_of(ty.block_size());
            let ty = if tensor.is_small() || !has_blocks {
                GgmlType::F32
            } else {
                ty
            };
            header.tensor(&tensor.name(), ty, tensor.ne)?;
            fills.push(self.fill(&tensor));
        }
        Ok((header, fills))
    }
}
