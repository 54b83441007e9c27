//! Settings of each architecture. They select how a layer call is computed, never what is computed.

/// How layer calls of an architecture are computed.
///
/// The fields are those of the [fork](https://github.com/adrianhoehne/llama.cpp) (`llama_moe_hot_cache_graph_profile`) that have
/// a meaning in this executor. The others describe nodes of its graph, which do not exist here:
///
/// - `branch_reduce_merge`, `merge_sum_rows`, `decode_strided_sum_rows`, `cold_prefix_sum`, `cold_prefix_weighted_sum`,
///   `prefix_reduce_tasks_max`: a lane on a GPU always adds its slots before the merge, and the CPU always adds those of its lanes,
///   so that one row per token is merged.
/// - `shared_input_row`, `decode_repeat_hot_input`, `cold_first_row_input`: no lane copies the activations of a token for each
///   slot.
/// - `pp_dense`, `pp_primary_cold_backend`: batches of at least the minimum size are computed on the GPU for every architecture.
/// - `pp_min_hot_expert_ratio`: a threshold for large batches of GLM-4 MoE; this executor has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Profile {
    /// Largest number of tokens of a call for which the CPU selects the experts from the router's scores, if it needs the
    /// selection for the worklist (`cpu_decode_routing_max_tokens`). Scores and activations are then copied together, and the
    /// kernel of the router is not launched. 0: the device of the layer selects the experts.
    pub cpu_routing_max_tokens: usize,
    /// Whether a lane on a GPU computes only its own entries of a single token and adds them without a slot for each selected
    /// expert (`decode_direct_merge`). Otherwise, as for several tokens, all slots of the token are computed, and those of other
    /// lanes use the dummy.
    pub direct_merge: bool,
}

impl Profile {
    /// The settings of an architecture without a profile: none of the shortcuts.
    pub const GENERAL: Profile = Profile {
        cpu_routing_max_tokens: 0,
        direct_merge: false,
    };

    /// The fork's settings for architectures that decode one token at a time.
    const SINGLE_TOKEN: Profile = Profile {
        cpu_routing_max_tokens: 1,
        direct_merge: true,
    };

    /// The fork's settings for architectures that decode a few tokens at a time.
    const SMALL_BATCH: Profile = Profile {
        cpu_routing_max_tokens: 4,
        direct_merge: true,
    };

    /// The profile of an architecture, by the value of `general.architecture`.
    pub fn of(arch: &str) -> Option<Profile> {
        let found = PROFILES.iter().find(|(name, _)| *name == arch);
        found.map(|(_, profile)| *profile)
    }
}

/// The profiles, by architecture. The fork has profiles for deepseek2, glm4moe, gpt-oss, mellum, qwen35moe and qwen3next; the others have
/// its settings for the same kind of router.
const PROFILES: &[(&str, Profile)] = &[
    ("afmoe", Profile::SINGLE_TOKEN),
    ("arctic", Profile::SINGLE_TOKEN),
    ("bailingmoe2", Profile::SINGLE_TOKEN),
    ("cohere2moe", Profile::SINGLE_TOKEN),
    ("dbrx", Profile::SINGLE_TOKEN),
    ("deepseek2", Profile::SINGLE_TOKEN),
    ("deepseek2-ocr", Profile::SINGLE_TOKEN),
    ("dots1", Profile::SINGLE_TOKEN),
    ("ernie4_5-moe", Profile::SINGLE_TOKEN),
    ("exaone-moe", Profile::SINGLE_TOKEN),
    ("gemma4", Profile::SINGLE_TOKEN),
    ("glm4moe", Profile::SINGLE_TOKEN),
    ("gpt-oss", Profile::SINGLE_TOKEN),
    ("granitehybrid", Profile::SINGLE_TOKEN),
    ("granitemoe", Profile::SINGLE_TOKEN),
    ("grok", Profile::SINGLE_TOKEN),
    ("hunyuan-moe", Profile::SINGLE_TOKEN),
    ("kimi-linear", Profile::SINGLE_TOKEN),
    ("lfm2moe", Profile::SINGLE_TOKEN),
    ("llama", Profile::SINGLE_TOKEN),
    ("llama4", Profile::SINGLE_TOKEN),
    ("mellum", Profile::SINGLE_TOKEN),
    ("mimo2", Profile::SINGLE_TOKEN),
    ("minimax-m2", Profile::SINGLE_TOKEN),
    ("mistral4", Profile::SINGLE_TOKEN),
    ("nemotron_h_moe", Profile::SINGLE_TOKEN),
    ("olmoe", Profile::SINGLE_TOKEN),
    ("phimoe", Profile::SINGLE_TOKEN),
    ("qwen2moe", Profile::SINGLE_TOKEN),
    ("qwen35moe", Profile::SINGLE_TOKEN),
    ("qwen3moe", Profile::SINGLE_TOKEN),
    ("qwen3next", Profile::SMALL_BATCH),
    ("smallthinker", Profile::SINGLE_TOKEN),
    ("step35", Profile::SINGLE_TOKEN),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of the documentation contains the same settings.
    #[test]
    fn every_architecture_has_a_documented_profile() {
        let path = moe_testkit::repository("docs/hot-cache.md");
        let page = std::fs::read_to_string(path).unwrap();
        let architectures: Vec<&str> = crate::arch::names().collect();
        let names: Vec<&str> = PROFILES.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, architectures);
        for (name, profile) in PROFILES {
            let merge = if profile.direct_merge { "yes" } else { "no" };
            let row = format!("| {name} | {} | {merge} |", profile.cpu_routing_max_tokens);
            assert!(page.contains(&row), "docs/hot-cache.md has no row {row:?}");
        }
    }

    #[test]
    fn unknown_architecture_has_no_profile() {
        assert_eq!(Profile::of("qwen3moe"), Some(Profile::SINGLE_TOKEN));
        assert_eq!(Profile::of("bert"), None);
    }
}
