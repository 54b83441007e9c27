//! Typed access to the `<arch>.*` keys of a GGUF file. Errors name the file, the key and its value.

use moe_gguf::{Gguf, PerLayer, Value, ValueType};

use crate::error::{Error, Result};
use crate::hparams::Gating;

/// Maximum width of a vector inside a model, elements.
pub(crate) const MAX_WIDTH: usize = 1 << 20;

const GATING: &str = "expert_gating_func";

/// The keys of one architecture.
pub(crate) struct Keys<'g> {
    pub(super) gguf: &'g Gguf,
    arch: String,
    /// `block_count`, including the blocks of an MTP head: the length of lists with one value per layer.
    n_block: usize,
}

impl<'g> Keys<'g> {
    /// The keys of the file's architecture.
    ///
    /// # Errors
    /// `general.architecture` is missing, or `block_count` is not an unsigned integer.
    pub(crate) fn new(gguf: &'g Gguf) -> Result<Self> {
        let arch = gguf
            .metadata()
            .str("general.architecture")?
            .map(str::to_owned);
        let arch = arch.ok_or_else(|| Error::MissingKey {
            file: gguf.files()[0].path.clone(),
            key: "general.architecture".into(),
            arch: "GGUF".into(),
        })?;
        let mut keys = Keys {
            gguf,
            arch,
            n_block: 0,
        };
        let n_block = gguf.metadata().u64(&keys.key("block_count"))?;
        keys.n_block = n_block.map_or(0, |n| usize::try_from(n).unwrap_or(usize::MAX));
        Ok(keys)
    }

    /// `block_count`, including the blocks of an MTP head.
    pub(crate) fn n_block(&self) -> usize {
        self.n_block
    }

    pub(crate) fn arch(&self) -> &str {
        &self.arch
    }

    pub(super) fn key(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.arch)
    }

    fn missing(&self, suffix: &str) -> Error {
        Error::MissingKey {
            file: self.gguf.files()[0].path.clone(),
            key: self.key(suffix),
            arch: self.arch.clone(),
        }
    }

    pub(super) fn no_experts(&self) -> Error {
        Error::NoExperts {
            file: self.gguf.files()[0].path.clone(),
            key: self.key("expert_count"),
        }
    }

    pub(crate) fn bad(&self, suffix: &str, value: impl ToString, reason: &str) -> Error {
        Error::BadKey {
            file: self.gguf.files()[0].path.clone(),
            key: self.key(suffix),
            value: value.to_string(),
            reason: reason.into(),
        }
    }

    /// The value of a key that is one number for all layers or a list with one number per block.
    pub(crate) fn values(&self, suffix: &str) -> Result<Option<PerLayer>> {
        let values = self.gguf.metadata().per_layer(&self.key(suffix))?;
        let checked = values.map(|values| self.checked(suffix, values));
        checked.transpose()
    }

    fn checked(&self, suffix: &str, values: PerLayer) -> Result<PerLayer> {
        if let PerLayer::Each(list) = &values
            && list.len() != self.n_block
        {
            let reason = format!(
                "a list must have one value for each of the {} blocks (`block_count`), but it has {}",
                self.n_block,
                list.len()
            );
            return Err(self.bad(suffix, values, &reason));
        }
        Ok(values)
    }

    /// A number that must be the same in all layers; `None` if the key is missing.
    pub(crate) fn opt_usize(&self, suffix: &str) -> Result<Option<usize>> {
        let Some(values) = self.values(suffix)? else {
            return Ok(None);
        };
        match values.uniform() {
            Some(value) => Ok(Some(to_usize(value))),
            None => Err(self.bad(
                suffix,
                values,
                "different values per layer are not supported for this key",
            )),
        }
    }

    /// Number of dense layers before the MoE layers (`leading_dense_block_count`).
    pub(crate) fn n_dense(&self) -> Result<usize> {
        Ok(self.opt_usize("leading_dense_block_count")?.unwrap_or(0))
    }

    /// The integers of a list whose length is not the number of blocks; empty if the key is missing.
    pub(crate) fn list(&self, suffix: &str) -> Result<Vec<u64>> {
        Ok(match self.gguf.metadata().per_layer(&self.key(suffix))? {
            Some(PerLayer::Each(list)) => list,
            Some(PerLayer::Same(value)) => vec![value],
            None => Vec::new(),
        })
    }

    pub(crate) fn usize(&self, suffix: &str) -> Result<usize> {
        self.opt_usize(suffix)?.ok_or_else(|| self.missing(suffix))
    }

    /// The values of the layers `used`, and 0 for the others of `n_layer` layers; `None` if the key is missing.
    ///
    /// # Errors
    /// The value of a layer in `used` is not in `1..=max`.
    pub(crate) fn opt_counts(
        &self,
        suffix: &str,
        used: &[usize],
        n_layer: usize,
        max: usize,
    ) -> Result<Option<Vec<usize>>> {
        let Some(values) = self.values(suffix)? else {
            return Ok(None);
        };
        let mut counts = vec![0; n_layer];
        for &layer in used {
            let value = values.get(layer).map_or(0, to_usize);
            if value == 0 || value > max {
                let reason = format!("{value} in layer {layer} is out of range (1..={max})");
                return Err(match values {
                    PerLayer::Same(_) => self.out_of_range(suffix, value, max),
                    PerLayer::Each(_) => self.bad(suffix, values, &reason),
                });
            }
            counts[layer] = value;
        }
        Ok(Some(counts))
    }

    /// The values of the layers `used`, and 0 for the others of `n_layer` layers.
    ///
    /// # Errors
    /// The key is missing, or the value of a layer in `used` is not in `1..=max`.
    pub(crate) fn counts(
        &self,
        suffix: &str,
        used: &[usize],
        n_layer: usize,
        max: usize,
    ) -> Result<Vec<usize>> {
        let counts = self.opt_counts(suffix, used, n_layer, max)?;
        counts.ok_or_else(|| self.missing(suffix))
    }

    /// Whether the key exists and its value, or a value of its list, is not 0.
    pub(crate) fn is_set(&self, suffix: &str) -> Result<bool> {
        let values = self.values(suffix)?;
        Ok(values.is_some_and(|values| values.max() != Some(0)))
    }

    /// A count in `1..=max`. The limit bounds the memory that a hostile header can make the executor allocate.
    pub(crate) fn count(&self, suffix: &str, max: usize) -> Result<usize> {
        let value = self.usize(suffix)?;
        self.bounded(suffix, value, max)
    }

    pub(crate) fn count_or(&self, suffix: &str, default: usize, max: usize) -> Result<usize> {
        match self.opt_usize(suffix)? {
            Some(value) => self.bounded(suffix, value, max),
            None => Ok(default),
        }
    }

    fn bounded(&self, suffix: &str, value: usize, max: usize) -> Result<usize> {
        if value == 0 || value > max {
            return Err(self.out_of_range(suffix, value, max));
        }
        Ok(value)
    }

    fn out_of_range(&self, suffix: &str, value: usize, max: usize) -> Error {
        self.bad(suffix, value, &format!("it is out of range (1..={max})"))
    }

    /// By layer, whether it is recurrent: `attention.recurrent_layers`, or all layers except the last of each
    /// `full_attention_interval` layers (4 if the key is missing).
    pub(crate) fn recurrent_layers(&self, n_layer: usize) -> Result<Vec<bool>> {
        const KEY: &str = "attention.recurrent_layers";
        let metadata = self.gguf.metadata();
        let flags = match metadata.get(&self.key(KEY)) {
            Some(Value::Bool(flag)) => Some(PerLayer::Same(u64::from(*flag))),
            Some(Value::Array(list)) if list.element_type() == ValueType::Bool => {
                let flags = list.iter().take(self.n_block.saturating_add(1));
                let flags = flags.map(|flag| u64::from(matches!(flag, Value::Bool(true))));
                Some(self.checked(KEY, PerLayer::Each(flags.collect()))?)
            }
            _ => self.values(KEY)?,
        };
        if let Some(flags) = flags {
            let is_set = |layer| flags.get(layer).is_some_and(|flag| flag != 0);
            return Ok((0..n_layer).map(is_set).collect());
        }
        let interval = self.count_or("full_attention_interval", 4, MAX_WIDTH)?;
        let is_recurrent = |layer: usize| !(layer + 1).is_multiple_of(interval);
        Ok((0..n_layer).map(is_recurrent).collect())
    }

    /// The length of the kernel of a convolution over tokens, minus 1: the number of earlier tokens that it reads.
    pub(crate) fn convolution_past(&self, suffix: &str) -> Result<usize> {
        const MAX: usize = 1 << 10;
        match self.count(suffix, MAX)? {
            1 => Err(self.bad(suffix, 1, "a kernel must have at least 2 elements")),
            n => Ok(n - 1),
        }
    }

    /// By layer, whether its attention is limited to a window (`attention.sliding_window_pattern`).
    ///
    /// The value is a list of flags or a period; without it, the period is `period`. The last layer of each period is not
    /// windowed, or the first if `dense_first`. A period of 0 means that all layers are windowed. Like in llama.cpp, layers
    /// beyond the end of a list are not windowed.
    pub(super) fn window_layers(
        &self,
        n_layer: usize,
        period: u64,
        dense_first: bool,
    ) -> Result<Vec<bool>> {
        const KEY: &str = "attention.sliding_window_pattern";
        let metadata = self.gguf.metadata();
        let values = match metadata.get(&self.key(KEY)) {
            Some(Value::Array(list)) if list.element_type() == ValueType::Bool => {
                let flags = list.iter().take(n_layer);
                let flags = flags.map(|flag| matches!(flag, Value::Bool(true)));
                PerLayer::Each(flags.map(u64::from).collect())
            }
            _ => metadata
                .per_layer(&self.key(KEY))?
                .unwrap_or(PerLayer::Same(period)),
        };
        let is_windowed = |layer: usize| match &values {
            PerLayer::Same(0) => true,
            PerLayer::Same(period) if dense_first => !(layer as u64).is_multiple_of(*period),
            PerLayer::Same(period) => !(layer as u64 + 1).is_multiple_of(*period),
            PerLayer::Each(flags) => flags.get(layer).is_some_and(|&flag| flag != 0),
        };
        Ok((0..n_layer).map(is_windowed).collect())
    }

    /// Checks that the header lists the layers whose attention is limited to a window.
    ///
    /// # Errors
    /// `attention.sliding_window_pattern` is missing, or not a list.
    pub(super) fn require_window_list(&self) -> Result<()> {
        const KEY: &str = "attention.sliding_window_pattern";
        match self.gguf.metadata().get(&self.key(KEY)) {
            Some(Value::Array(_)) => Ok(()),
            Some(_) => Err(self.bad(
                KEY,
                "one value",
                "it must be a list with a flag for each layer",
            )),
            None => Err(self.missing(KEY)),
        }
    }

    /// The gating function of the router (`expert_gating_func`); `default` if the key is missing or 0.
    pub(crate) fn gating_or(&self, default: Gating) -> Result<Gating> {
        if self.is_set(GATING)? {
            self.gating()
        } else {
            Ok(default)
        }
    }

    /// The gating function of the router (`expert_gating_func`).
    pub(crate) fn gating(&self) -> Result<Gating> {
        const KEY: &str = GATING;
        match self.usize(KEY)? {
            1 => Ok(Gating::Softmax),
            2 => Ok(Gating::Sigmoid),
            3 => Ok(Gating::SoftmaxOfSelected),
            other => Err(self.bad(
                KEY,
                other,
                "the supported values are 1 (softmax), 2 (sigmoid) and 3 (softmax over the selected experts)",
            )),
        }
    }

    /// Factor on the weights of the selected experts (`expert_weights_scale`); 0 in the file means 1.
    pub(crate) fn weights_scale(&self) -> Result<f32> {
        let scale = self.f32_or("expert_weights_scale", 1.0)?;
        Ok(if scale == 0.0 { 1.0 } else { scale })
    }

    /// A factor; `None` if the key is missing or 0, which means no factor.
    pub(crate) fn opt_factor(&self, suffix: &str) -> Result<Option<f32>> {
        Ok(self.opt_f32(suffix)?.filter(|&factor| factor != 0.0))
    }

    pub(crate) fn opt_f32(&self, suffix: &str) -> Result<Option<f32>> {
        let value = self.gguf.metadata().f32(&self.key(suffix))?;
        match value.filter(|value| !value.is_finite()) {
            Some(value) => Err(self.bad(suffix, value, "it must be finite")),
            None => Ok(value),
        }
    }

    /// The numbers of a key that is one number for all blocks or a list with one number per block; `None` if the key is missing.
    pub(crate) fn f32_by_block(&self, suffix: &str) -> Result<Option<Vec<f32>>> {
        let Some(Value::Array(list)) = self.gguf.metadata().get(&self.key(suffix)) else {
            let value = self.opt_f32(suffix)?;
            return Ok(value.map(|value| vec![value; self.n_block]));
        };
        let numbers = list
            .iter()
            .map(|value| value.as_f64().map(|value| value as f32));
        let numbers: Option<Vec<f32>> = numbers.collect();
        let is_valid = |numbers: &Vec<f32>| {
            numbers.len() == self.n_block && numbers.iter().all(|number| number.is_finite())
        };
        match numbers.filter(is_valid) {
            Some(numbers) => Ok(Some(numbers)),
            None => {
                let reason = format!(
                    "a list must have a finite floating-point number for each of the {} blocks (`block_count`)",
                    self.n_block
                );
                Err(self.bad(suffix, format!("a list of {} values", list.len()), &reason))
            }
        }
    }

    pub(crate) fn f32_or(&self, suffix: &str, default: f32) -> Result<f32> {
        Ok(self.opt_f32(suffix)?.unwrap_or(default))
    }

    pub(crate) fn f32(&self, suffix: &str) -> Result<f32> {
        self.opt_f32(suffix)?.ok_or_else(|| self.missing(suffix))
    }

    pub(crate) fn bool_or(&self, suffix: &str, default: bool) -> Result<bool> {
        let value = self.gguf.metadata().bool(&self.key(suffix))?;
        Ok(value.unwrap_or(default))
    }

    pub(crate) fn opt_str(&self, suffix: &str) -> Result<Option<&'g str>> {
        Ok(self.gguf.metadata().str(&self.key(suffix))?)
    }
}

fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}
