//! Which side a tensor lives on: the rules of llama.cpp's `--n-gpu-layers`, `--cpu-moe`, `--n-cpu-moe` and
//! `--override-tensor`.

use std::str::FromStr;

use fancy_regex::Regex;

use crate::weights::Place;

/// Processor and memory of the host, or the GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Side {
    /// The host.
    #[default]
    Host,
    /// The GPU.
    Gpu,
}

/// Tensors whose name matches live on a side, whatever their layer.
#[derive(Debug, Clone)]
pub struct Override {
    /// Found anywhere in the name.
    pub pattern: Regex,
    /// Where they live.
    pub side: Side,
}

impl FromStr for Override {
    type Err = String;

    /// Reads `REGEX=CPU` or `REGEX=CUDA0`.
    fn from_str(rule: &str) -> Result<Override, String> {
        let form = "write REGEX=CPU or REGEX=CUDA0";
        let (pattern, side) = rule.rsplit_once('=').ok_or(form)?;
        let side = match side {
            "CPU" => Side::Host,
            "CUDA0" => Side::Gpu,
            _ => return Err(form.to_owned()),
        };
        let pattern = Regex::new(pattern).map_err(|error| error.to_string())?;
        Ok(Override { pattern, side })
    }
}

/// Where the tensors of a model live.
#[derive(Debug, Clone)]
pub struct Placement {
    n_layer: usize,
    n_gpu_layers: usize,
    overrides: Vec<Override>,
}

/// Stacks of expert matrices, as llama.cpp's `--cpu-moe` finds them.
const EXPERTS: &str = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps";

impl Placement {
    /// The last `n_gpu_layers` of `n_layer` layers on the GPU, of which the output counts as one, the very last. Of
    /// `overrides` the first that matches decides.
    pub fn new(n_layer: usize, n_gpu_layers: usize, overrides: Vec<Override>) -> Placement {
        Placement {
            n_layer,
            n_gpu_layers,
            overrides,
        }
    }

    /// Adds a rule behind the others: the experts of the first `n` layers live on the host; of all layers for `None`.
    #[must_use]
    pub fn experts_on_host(mut self, n: Option<usize>) -> Placement {
        let patterns = match n {
            None => vec![EXPERTS.to_owned()],
            Some(n) => (0..n).map(|il| format!(r"blk\.{il}{EXPERTS}")).collect(),
        };
        self.overrides
            .extend(patterns.iter().map(|pattern| Override {
                pattern:
                    Regex::new(pattern).expect("the pattern is made of constants and a number"),
                side: Side::Host,
            }));
        self
    }

    /// Where layer `il` is computed; `n_layer` stands for the output.
    pub fn layer(&self, il: usize) -> Side {
        match il >= (self.n_layer + 1).saturating_sub(self.n_gpu_layers) {
            true => Side::Gpu,
            false => Side::Host,
        }
    }

    /// Where a tensor lives. The embeddings stay with the host, which looks rows up in them.
    pub fn tensor(&self, place: &Place) -> Side {
        let matches = |rule: &&Override| rule.pattern.is_match(&place.name).unwrap_or(false);
        if let Some(rule) = self.overrides.iter().find(matches) {
            return rule.side;
        }
        self.layer(place.layer.map_or(self.n_layer, usize::from))
    }
}

#[cfg(test)]
mod tests {
    use moe_gguf::GgmlType;

    use super::*;

    fn side(placement: &Placement, name: &str, layer: Option<u16>) -> Side {
        placement.tensor(&Place {
            name: name.into(),
            tensor_idx: 0,
            file: 0,
            layer,
            offset: 0,
            size_bytes: 0,
            ne: [1; 4],
            ty: GgmlType::F32,
        })
    }

    #[test]
    fn the_output_is_the_last_layer_and_goes_first() {
        let none = Placement::new(4, 0, Vec::new());
        assert!((0..=4).all(|il| none.layer(il) == Side::Host));
        let one = Placement::new(4, 1, Vec::new());
        assert_eq!(side(&one, "output.weight", None), Side::Gpu);
        assert_eq!(side(&one, "blk.3.attn_q.weight", Some(3)), Side::Host);
        let three = Placement::new(4, 3, Vec::new());
        assert_eq!(side(&three, "blk.2.attn_q.weight", Some(2)), Side::Gpu);
        assert_eq!(side(&three, "blk.1.attn_q.weight", Some(1)), Side::Host);
        let all = Placement::new(4, 99, Vec::new());
        assert!((0..=4).all(|il| all.layer(il) == Side::Gpu));
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let rule = "blk.1.ffn_gate_exps=CUDA0".parse().unwrap();
        let placement = Placement::new(4, 99, vec![rule]).experts_on_host(None);
        let experts = |il: u16, part: &str| format!("blk.{il}.ffn_{part}_exps.weight");
        assert_eq!(side(&placement, &experts(0, "gate"), Some(0)), Side::Host);
        assert_eq!(side(&placement, &experts(1, "gate"), Some(1)), Side::Gpu);
        assert_eq!(side(&placement, &experts(1, "up"), Some(1)), Side::Host);
        assert_eq!(
            side(&placement, "blk.0.ffn_gate_inp.weight", Some(0)),
            Side::Gpu
        );
        assert_eq!(
            side(&placement, "blk.0.ffn_gate_shexp.weight", Some(0)),
            Side::Gpu
        );
    }

    #[test]
    fn a_rule_that_is_none_is_told() {
        for rule in ["exps", "exps=CUDA1", "(=CPU"] {
            assert!(rule.parse::<Override>().is_err(), "{rule}");
        }
    }

    #[test]
    fn experts_of_the_first_layers_stay_with_the_host() {
        let placement = Placement::new(12, 99, Vec::new()).experts_on_host(Some(2));
        let down = |il: u16| {
            side(
                &placement,
                &format!("blk.{il}.ffn_down_exps.weight"),
                Some(il),
            )
        };
        assert_eq!(
            [0, 1, 2, 10, 11].map(down),
            [Side::Host, Side::Host, Side::Gpu, Side::Gpu, Side::Gpu]
        );
    }
}
