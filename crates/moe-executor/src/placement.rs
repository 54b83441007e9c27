//! Placement of tensors on devices with llama.cpp's rules: the last layers on GPUs, experts on the CPU, tensors by name.

use std::collections::HashMap;
use std::str::FromStr;

use fancy_regex::Regex;
use moe_files::text::counted;

use moe_gguf::LayerId;

use crate::device_id::{DeviceId, NotADevice};
use crate::weights::Place;

/// Errors of rules that place tensors by name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is not a rule.
    #[error(
        "`{rule}` is not a rule REGEX=CPU or REGEX=CUDAn, where CUDA0 is the first GPU; commas separate rules, so REGEX \
         must not contain a comma"
    )]
    Syntax {
        /// The text.
        rule: String,
    },
    /// The regular expression is invalid.
    #[error("`{pattern}` is not a valid regular expression: {source}")]
    Pattern {
        /// The regular expression.
        pattern: String,
        /// Error of the parser.
        source: Box<fancy_regex::Error>,
    },
    /// The matcher exceeded its limits on the name of a tensor.
    #[error(
        "`{pattern}` cannot be matched with tensor `{tensor}`: {source}; simplify the expression"
    )]
    Match {
        /// The regular expression.
        pattern: String,
        /// The tensor's name.
        tensor: String,
        /// Too many steps, or too deep a recursion.
        source: Box<fancy_regex::Error>,
    },
    /// A rule names a GPU that is not in the list of devices.
    #[error(
        "`{pattern}={device}`: {device} is not in the list of devices, which has {}",
        counted(*.n_gpus, "GPU")
    )]
    NoSuchDevice {
        /// The regular expression.
        pattern: String,
        /// The GPU.
        device: DeviceId,
        /// Number of GPUs in the list.
        n_gpus: usize,
    },
}

/// A rule that places the tensors whose names match on a device (llama.cpp's `--override-tensor`).
#[derive(Debug, Clone)]
pub struct Override {
    /// Matches if it is found anywhere in the name of a tensor.
    pub pattern: Regex,
    /// Device of the tensors that match.
    pub device: DeviceId,
}

impl FromStr for Override {
    type Err = Error;

    /// Parses `REGEX=CPU` or `REGEX=CUDA0`.
    fn from_str(rule: &str) -> Result<Override, Error> {
        let syntax = || Error::Syntax {
            rule: rule.to_owned(),
        };
        let (pattern, device) = rule.rsplit_once('=').ok_or_else(syntax)?;
        let device = device.parse().map_err(|NotADevice| syntax())?;
        let pattern = Regex::new(pattern).map_err(|source| Error::Pattern {
            pattern: pattern.to_owned(),
            source: Box::new(source),
        })?;
        Ok(Override { pattern, device })
    }
}

/// Rules for the placement of a model's tensors.
#[derive(Debug, Clone)]
pub struct Rules {
    n_layer: usize,
    n_gpu_layers: usize,
    /// Relative share of the layers per GPU; not normalized.
    split: Vec<f32>,
    overrides: Vec<Override>,
}

/// The device of each tensor of a model. By default all tensors are on the CPU.
#[derive(Debug, Clone, Default)]
pub struct Placement {
    /// Device of each layer.
    layers: Vec<DeviceId>,
    /// Device of the output.
    output: DeviceId,
    /// Device of each tensor that an [`Override`] matches, by the tensor's name.
    overridden: HashMap<String, DeviceId>,
}

/// Matches the tensors of routed experts: the pattern of llama.cpp's `--cpu-moe`.
const EXPERTS: &str = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps";

impl Rules {
    /// Places the last `n_gpu_layers` of `n_layer + 1` layers on the GPU. The additional layer is the output, which is
    /// the last. The first of the `overrides` that matches a tensor takes precedence over its layer.
    pub fn new(n_layer: usize, n_gpu_layers: usize, overrides: Vec<Override>) -> Rules {
        Rules {
            n_layer,
            n_gpu_layers,
            split: vec![1.0],
            overrides,
        }
    }

    /// Splits the GPU layers in proportion to `split`, which has one value per GPU (llama.cpp's `--tensor-split`). If all
    /// values are 0, the shares are equal.
    #[must_use]
    pub fn split_layers(mut self, split: Vec<f32>) -> Rules {
        let is_equal = split.iter().all(|&share| share == 0.0);
        self.split = if is_equal {
            vec![1.0; split.len()]
        } else {
            split
        };
        self
    }

    /// Adds a rule after the others: the experts of the first `n` layers are on the CPU. `None` means all layers.
    #[must_use]
    pub fn experts_on_cpu(mut self, n: Option<usize>) -> Rules {
        let patterns = match n {
            None => vec![EXPERTS.to_owned()],
            Some(n) => (0..n).map(|il| format!(r"blk\.{il}{EXPERTS}")).collect(),
        };
        self.overrides
            .extend(patterns.iter().map(|pattern| Override {
                pattern:
                    Regex::new(pattern).expect("the pattern is made of constants and a number"),
                device: DeviceId::Cpu,
            }));
        self
    }

    /// Applies the rules to the tensors of a model, given by name.
    ///
    /// # Errors
    /// [`Error::Match`] if the matcher exceeds its limits on a name, [`Error::NoSuchDevice`] if a rule names a GPU beyond the split.
    pub fn resolve<'a>(
        &self,
        tensors: impl IntoIterator<Item = &'a str>,
    ) -> Result<Placement, Error> {
        let n_gpus = self.split.len();
        for Override { pattern, device } in &self.overrides {
            if matches!(device, DeviceId::Gpu(index) if *index >= n_gpus) {
                return Err(Error::NoSuchDevice {
                    pattern: pattern.as_str().to_owned(),
                    device: *device,
                    n_gpus,
                });
            }
        }
        let mut overridden = HashMap::new();
        for tensor in tensors {
            for rule in &self.overrides {
                let matches = rule.pattern.is_match(tensor);
                if matches.map_err(|source| Error::Match {
                    pattern: rule.pattern.as_str().to_owned(),
                    tensor: tensor.to_owned(),
                    source: Box::new(source),
                })? {
                    overridden.insert(tensor.to_owned(), rule.device);
                    break;
                }
            }
        }
        let mut layers = self.layers_and_output();
        let output = layers.pop().unwrap_or_default();
        Ok(Placement {
            layers,
            output,
            overridden,
        })
    }

    /// Device of each layer, then of the output, computed like in llama.cpp: the `i`-th of `n` GPU layers is on the first GPU
    /// whose cumulative share is greater than `i / n`.
    fn layers_and_output(&self) -> Vec<DeviceId> {
        let n_all = self.n_layer + 1;
        let n = n_all.min(self.n_gpu_layers);
        let total: f32 = self.split.iter().sum();
        let gpu = |i: usize| {
            let at = i as f32 / n as f32;
            let mut sum = 0.0;
            let ends = self.split.iter().map(|share| {
                sum += share;
                sum / total
            });
            let gpu = ends.into_iter().position(|end| end > at);
            DeviceId::Gpu(gpu.unwrap_or(self.split.len().saturating_sub(1)))
        };
        let on_cpu = std::iter::repeat_n(DeviceId::Cpu, n_all - n);
        on_cpu.chain((0..n).map(gpu)).collect()
    }
}

impl Placement {
    /// Whether the CPU holds a layer, the output or a tensor.
    pub fn uses_cpu(&self) -> bool {
        let layers = self.layers.iter().chain([&self.output]);
        let mut devices = layers.chain(self.overridden.values());
        devices.any(|device| *device == DeviceId::Cpu)
    }

    /// The device that computes a layer; the CPU for layers beyond the last.
    pub fn layer(&self, layer: LayerId) -> DeviceId {
        self.layers.get(layer.index()).copied().unwrap_or_default()
    }

    /// The device that computes the output.
    pub fn output(&self) -> DeviceId {
        self.output
    }

    /// The device of the layer that a tensor belongs to. Tensors outside the layers belong to the output.
    pub fn layer_of(&self, place: &Place) -> DeviceId {
        place.layer.map_or(self.output, |layer| self.layer(layer))
    }

    /// The device of a tensor. The token embeddings are read on the CPU, whatever their device is here.
    pub fn tensor(&self, place: &Place) -> DeviceId {
        self.named(&place.name, place.layer)
    }

    /// Like [`Placement::tensor`], for a tensor given by its name and layer. Tensors outside the layers belong to the output.
    pub fn named(&self, name: &str, layer: Option<LayerId>) -> DeviceId {
        let overridden = self.overridden.get(name).copied();
        overridden.unwrap_or_else(|| layer.map_or(self.output, |layer| self.layer(layer)))
    }
}

#[cfg(test)]
mod tests {
    use moe_gguf::GgmlType;

    use super::*;

    fn device(rules: &Rules, name: &str, layer: Option<u16>) -> DeviceId {
        rules.resolve([name]).unwrap().tensor(&Place {
            name: name.into(),
            tensor_idx: 0,
            file: 0,
            layer: layer.map(LayerId),
            offset: 0,
            size_bytes: 0,
            ne: [1; 4],
            ty: GgmlType::F32,
        })
    }

    /// Devices of four layers and the output.
    fn devices(placement: &Placement) -> [DeviceId; 5] {
        let [a, b, c, d] = [0, 1, 2, 3].map(|layer| placement.layer(LayerId(layer)));
        [a, b, c, d, placement.output()]
    }

    #[test]
    fn output_counts_as_the_last_layer() {
        let none = Rules::new(4, 0, Vec::new()).resolve([]).unwrap();
        assert_eq!(devices(&none), [DeviceId::Cpu; 5]);
        let one = Rules::new(4, 1, Vec::new());
        assert_eq!(device(&one, "output.weight", None), DeviceId::Gpu(0));
        assert_eq!(device(&one, "blk.3.attn_q.weight", Some(3)), DeviceId::Cpu);
        let three = Rules::new(4, 3, Vec::new());
        assert_eq!(
            device(&three, "blk.2.attn_q.weight", Some(2)),
            DeviceId::Gpu(0)
        );
        assert_eq!(
            device(&three, "blk.1.attn_q.weight", Some(1)),
            DeviceId::Cpu
        );
        let all = Rules::new(4, 99, Vec::new()).resolve([]).unwrap();
        assert_eq!(devices(&all), [DeviceId::Gpu(0); 5]);
    }

    #[test]
    fn first_matching_override_takes_precedence() {
        let rule = "blk.1.ffn_gate_exps=CUDA0".parse().unwrap();
        let placement = Rules::new(4, 99, vec![rule]).experts_on_cpu(None);
        let experts = |il: u16, part: &str| format!("blk.{il}.ffn_{part}_exps.weight");
        assert_eq!(
            device(&placement, &experts(0, "gate"), Some(0)),
            DeviceId::Cpu
        );
        assert_eq!(
            device(&placement, &experts(1, "gate"), Some(1)),
            DeviceId::Gpu(0)
        );
        assert_eq!(
            device(&placement, &experts(1, "up"), Some(1)),
            DeviceId::Cpu
        );
        assert_eq!(
            device(&placement, "blk.0.ffn_gate_inp.weight", Some(0)),
            DeviceId::Gpu(0)
        );
        assert_eq!(
            device(&placement, "blk.0.ffn_gate_shexp.weight", Some(0)),
            DeviceId::Gpu(0)
        );
    }

    #[test]
    fn rejects_malformed_overrides() {
        let error = |rule: &str| rule.parse::<Override>().unwrap_err();
        for rule in ["exps", "exps=CUDA", "exps=CUDA+1", "exps=cpu"] {
            let error = error(rule);
            assert!(
                matches!(&error, Error::Syntax { rule: text } if text == rule),
                "{error}"
            );
        }
        assert!(matches!(error("(=CPU"), Error::Pattern { pattern, .. } if pattern == "("));
    }

    /// The backtracking matcher exceeds its limit on this pattern. Treating that as "no match" would place the tensor elsewhere.
    #[test]
    fn reports_a_match_that_exceeds_the_limits() {
        let rule = r"(a|b|ab)*(?=c)=CPU".parse().unwrap();
        let name = "ab".repeat(32);
        let error = Rules::new(4, 99, vec![rule]).resolve([&*name]).unwrap_err();
        assert!(!error.to_string().contains('\n'), "{error}");
        assert!(matches!(error, Error::Match { tensor, .. } if tensor == name));
    }

    /// llama.cpp matches with `std::regex`, which supports both.
    #[test]
    fn supports_lookahead_and_back_references() {
        let rules = |rule: &str| Rules::new(30, 99, vec![rule.parse().unwrap()]);
        let experts = |il: u16| format!("blk.{il}.ffn_down_exps.weight");
        let ahead = rules(r"blk\.(?!(?:0|1)\.).*ffn_.*_exps\.=CPU");
        assert_eq!(device(&ahead, &experts(1), Some(1)), DeviceId::Gpu(0));
        assert_eq!(device(&ahead, &experts(11), Some(11)), DeviceId::Cpu);
        let again = rules(r"blk\.(\d)\1\.ffn=CPU");
        assert_eq!(device(&again, &experts(11), Some(11)), DeviceId::Cpu);
        assert_eq!(device(&again, &experts(12), Some(12)), DeviceId::Gpu(0));
    }

    #[test]
    fn splits_layers_in_proportion() {
        use DeviceId::{Cpu, Gpu};
        let layers = |n_gpu_layers, split: &[f32]| {
            let rules = Rules::new(4, n_gpu_layers, Vec::new()).split_layers(split.to_vec());
            let placement = rules.resolve([]).unwrap();
            devices(&placement)
        };
        assert_eq!(layers(99, &[1.0]), [Gpu(0); 5]);
        // Like llama.cpp: 0/5, 1/5 and 2/5 are less than 1/2.
        let halves = [Gpu(0), Gpu(0), Gpu(0), Gpu(1), Gpu(1)];
        assert_eq!(layers(99, &[1.0, 1.0]), halves);
        assert_eq!(layers(99, &[0.0, 0.0]), halves);
        assert_eq!(layers(3, &[1.0, 2.0]), [Cpu, Cpu, Gpu(0), Gpu(1), Gpu(1)]);
        assert_eq!(layers(2, &[0.0, 3.0]), [Cpu, Cpu, Cpu, Gpu(1), Gpu(1)]);
        assert_eq!(layers(5, &[1.0, 0.0, 4.0])[..2], [Gpu(0), Gpu(2)]);
    }

    #[test]
    fn overrides_may_name_any_gpu_of_the_list() {
        let rules =
            |rule: &str| Rules::new(2, 0, vec![rule.parse().unwrap()]).split_layers(vec![1.0; 2]);
        let exps = "blk.0.ffn_up_exps.weight";
        let second = rules("exps=CUDA1");
        assert_eq!(device(&second, exps, Some(0)), DeviceId::Gpu(1));
        let error = rules("exps=CUDA2").resolve([exps]).unwrap_err();
        let third = DeviceId::Gpu(2);
        assert!(
            matches!(error, Error::NoSuchDevice { device, n_gpus: 2, .. } if device == third),
            "{error}"
        );
    }

    #[test]
    fn places_experts_of_the_first_layers_on_the_cpu() {
        let placement = Rules::new(12, 99, Vec::new()).experts_on_cpu(Some(2));
        let down = |il: u16| {
            device(
                &placement,
                &format!("blk.{il}.ffn_down_exps.weight"),
                Some(il),
            )
        };
        assert_eq!(
            [0, 1, 2, 10, 11].map(down),
            [
                DeviceId::Cpu,
                DeviceId::Cpu,
                DeviceId::Gpu(0),
                DeviceId::Gpu(0),
                DeviceId::Gpu(0)
            ]
        );
    }
}
