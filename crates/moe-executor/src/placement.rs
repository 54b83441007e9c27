//! Which side a tensor lives on: llama.cpp's rules for layers on the GPU, experts on the CPU and tensors by name.

use std::collections::HashMap;
use std::str::FromStr;

use fancy_regex::Regex;

use crate::weights::Place;

/// A rule for tensors by name that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is not of the form of a rule.
    #[error("`{rule}` is not of the form REGEX=CPU or REGEX=CUDA0")]
    Form {
        /// The text.
        rule: String,
    },
    /// The regular expression has a fault.
    #[error("`{pattern}` is not a regular expression: {source}")]
    Pattern {
        /// The regular expression.
        pattern: String,
        /// Its fault.
        source: Box<fancy_regex::Error>,
    },
    /// Whether a tensor matches cannot be found out.
    #[error(
        "`{pattern}` cannot be matched with tensor `{tensor}`: {source}; simplify the expression"
    )]
    Match {
        /// The regular expression.
        pattern: String,
        /// The tensor's name.
        tensor: String,
        /// Why not: too many steps, or too deep a recursion.
        source: Box<fancy_regex::Error>,
    },
}

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
    type Err = Error;

    /// Reads `REGEX=CPU` or `REGEX=CUDA0`.
    fn from_str(rule: &str) -> Result<Override, Error> {
        let form = || Error::Form {
            rule: rule.to_owned(),
        };
        let (pattern, side) = rule.rsplit_once('=').ok_or_else(form)?;
        let side = match side {
            "CPU" => Side::Host,
            "CUDA0" => Side::Gpu,
            _ => return Err(form()),
        };
        let pattern = Regex::new(pattern).map_err(|source| Error::Pattern {
            pattern: pattern.to_owned(),
            source: Box::new(source),
        })?;
        Ok(Override { pattern, side })
    }
}

/// Rules of where the tensors of a model live.
#[derive(Debug, Clone)]
pub struct Rules {
    n_layer: usize,
    n_gpu_layers: usize,
    overrides: Vec<Override>,
}

/// Where the tensors of a model live.
#[derive(Debug, Clone)]
pub struct Placement {
    n_layer: usize,
    n_gpu_layers: usize,
    /// Tensors that a rule matches, by name.
    overridden: HashMap<String, Side>,
}

/// Stacks of expert matrices, as llama.cpp's `--cpu-moe` finds them.
const EXPERTS: &str = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps";

impl Rules {
    /// The last `n_gpu_layers` of `n_layer` layers on the GPU, of which the output counts as one, the very last. Of
    /// `overrides` the first that matches decides.
    pub fn new(n_layer: usize, n_gpu_layers: usize, overrides: Vec<Override>) -> Rules {
        Rules {
            n_layer,
            n_gpu_layers,
            overrides,
        }
    }

    /// Adds a rule after the others: the experts of the first `n` layers live on the host; of all layers for `None`.
    #[must_use]
    pub fn experts_on_host(mut self, n: Option<usize>) -> Rules {
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

    /// Applies the rules to the tensors of a model, by their names.
    ///
    /// # Errors
    /// [`Error::Match`] where a regular expression gives up on a name.
    pub fn resolve<'a>(
        &self,
        tensors: impl IntoIterator<Item = &'a str>,
    ) -> Result<Placement, Error> {
        let mut overridden = HashMap::new();
        for tensor in tensors {
            for rule in &self.overrides {
                let matches = rule.pattern.is_match(tensor);
                if matches.map_err(|source| Error::Match {
                    pattern: rule.pattern.as_str().to_owned(),
                    tensor: tensor.to_owned(),
                    source: Box::new(source),
                })? {
                    overridden.insert(tensor.to_owned(), rule.side);
                    break;
                }
            }
        }
        Ok(Placement {
            n_layer: self.n_layer,
            n_gpu_layers: self.n_gpu_layers,
            overridden,
        })
    }
}

impl Placement {
    /// Where layer `il` is computed; `n_layer` stands for the output.
    pub fn layer(&self, il: usize) -> Side {
        if il >= (self.n_layer + 1).saturating_sub(self.n_gpu_layers) {
            Side::Gpu
        } else {
            Side::Host
        }
    }

    /// Where a tensor lives. The embeddings stay with the host, which looks rows up in them.
    pub fn tensor(&self, place: &Place) -> Side {
        match self.overridden.get(&place.name) {
            Some(&side) => side,
            None => self.layer(place.layer.map_or(self.n_layer, usize::from)),
        }
    }
}

#[cfg(test)]
mod tests {
    use moe_gguf::GgmlType;

    use super::*;

    fn side(rules: &Rules, name: &str, layer: Option<u16>) -> Side {
        rules.resolve([name]).unwrap().tensor(&Place {
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
        let none = Rules::new(4, 0, Vec::new()).resolve([]).unwrap();
        assert!((0..=4).all(|il| none.layer(il) == Side::Host));
        let one = Rules::new(4, 1, Vec::new());
        assert_eq!(side(&one, "output.weight", None), Side::Gpu);
        assert_eq!(side(&one, "blk.3.attn_q.weight", Some(3)), Side::Host);
        let three = Rules::new(4, 3, Vec::new());
        assert_eq!(side(&three, "blk.2.attn_q.weight", Some(2)), Side::Gpu);
        assert_eq!(side(&three, "blk.1.attn_q.weight", Some(1)), Side::Host);
        let all = Rules::new(4, 99, Vec::new()).resolve([]).unwrap();
        assert!((0..=4).all(|il| all.layer(il) == Side::Gpu));
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let rule = "blk.1.ffn_gate_exps=CUDA0".parse().unwrap();
        let placement = Rules::new(4, 99, vec![rule]).experts_on_host(None);
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
    fn rejects_rules_that_cannot_be_read() {
        let error = |rule: &str| rule.parse::<Override>().unwrap_err().to_string();
        for rule in ["exps", "exps=CUDA1", "exps=cpu"] {
            assert_eq!(
                error(rule),
                format!("`{rule}` is not of the form REGEX=CPU or REGEX=CUDA0")
            );
        }
        assert!(error("(=CPU").starts_with("`(` is not a regular expression: "));
    }

    /// A backtracking matcher gives up on this; that is no "does not match", which would put the tensor elsewhere.
    #[test]
    fn a_match_that_gives_up_is_an_error() {
        let rule = r"(a|b|ab)*(?=c)=CPU".parse().unwrap();
        let name = "ab".repeat(32);
        let error = Rules::new(4, 99, vec![rule]).resolve([&*name]).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Match { .. }), "{text}");
        assert!(text.contains(&name) && !text.contains('\n'), "{text}");
    }

    /// What users of llama.cpp write, which matches with std::regex.
    #[test]
    fn patterns_with_lookahead_and_back_references_work() {
        let rules = |rule: &str| Rules::new(30, 99, vec![rule.parse().unwrap()]);
        let experts = |il: u16| format!("blk.{il}.ffn_down_exps.weight");
        let ahead = rules(r"blk\.(?!(?:0|1)\.).*ffn_.*_exps\.=CPU");
        assert_eq!(side(&ahead, &experts(1), Some(1)), Side::Gpu);
        assert_eq!(side(&ahead, &experts(11), Some(11)), Side::Host);
        let again = rules(r"blk\.(\d)\1\.ffn=CPU");
        assert_eq!(side(&again, &experts(11), Some(11)), Side::Host);
        assert_eq!(side(&again, &experts(12), Some(12)), Side::Gpu);
    }

    #[test]
    fn experts_of_the_first_layers_stay_with_the_host() {
        let placement = Rules::new(12, 99, Vec::new()).experts_on_host(Some(2));
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
