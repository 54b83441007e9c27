//! Small models of any architecture: a list of header keys and tensors, with random values. For tests.

use std::collections::BTreeMap;

use moe_gguf::{Array, GgmlType, Value, ValueType};
use serde::Deserialize;

use super::spec::VocabSpec;
use super::tensors::Fill;
use super::{Error, blocks, keys, vocab};
use crate::write::Header;

/// The header keys and tensors of a small model.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// `general.architecture`.
    pub arch: String,
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

/// Standard deviation of biases.
const BIAS: f64 = 0.1;

/// Whether llama.cpp requires F32 for a tensor that may be a matrix, given its name without the layer.
fn is_f32(part: &str) -> bool {
    const SMALL: [&str; 5] = [
        "shortconv.conv.weight",
        "ssm_a",
        "ssm_conv1d.weight",
        "ssm_d",
        "ssm_norm.weight",
    ];
    part.starts_with("ffn_gate_inp") || SMALL.contains(&part)
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
        let mut header = Header::new();
        header.set("general.architecture", &Value::String(self.arch.clone()))?;
        for (key, value) in &self.keys {
            header.set(&format!("{}.{key}", self.arch), &value.value())?;
        }
        keys::tokenizer(&mut header, &self.vocab, vocab::vocab(&self.vocab)?)?;
        let mut fills = Vec::new();
        let mut add = |name: &str, part: &str, ne: &[u64]| -> Result<(), Error> {
            let n_in = ne.first().copied().unwrap_or(1);
            let is_vector = ne.len() == 1 || part.ends_with(".bias");
            let has_blocks = n_in.is_multiple_of(ty.block_size());
            let ty = if is_vector || !has_blocks || is_f32(part) {
                GgmlType::F32
            } else {
                ty
            };
            header.tensor(name, ty, ne)?;
            let scale = self.scales.get(part).copied();
            fills.push(match scale {
                None if part.ends_with(".bias") => Fill::Noise(BIAS),
                None if part.contains("norm") || part.starts_with("rope_") => Fill::Norm,
                None if part == "ssm_a" => Fill::Decay,
                scale if is_vector => Fill::Noise(scale.unwrap_or(1.0)),
                scale => Fill::Noise(scale.unwrap_or(1.0) / (n_in as f64).sqrt()),
            });
            Ok(())
        };
        for (name, ne) in &self.tensors {
            add(name, name, ne)?;
        }
        for range in &self.layers {
            for layer in range.from..range.to {
                for (part, ne) in &range.tensors {
                    add(&format!("blk.{layer}.{part}"), part, ne)?;
                }
            }
        }
        Ok((header, fills))
    }
}
