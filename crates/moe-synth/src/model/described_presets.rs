//! Descriptions of published models, in `presets/`.
//!
//! Sizes are from the published configurations and from the headers that llama.cpp prints for the published GGUF files. The numbers of
//! tensors and parameters are those of these files. Vocabularies have the published number of tokens, but synthetic words, and their
//! control tokens are at the end.

use super::description::Description;

/// Names and JSON texts. Each has at most 4 kB.
const FILES: [(&str, &str); 11] = [
    ("afmoe", include_str!("../../presets/afmoe.json")),
    ("arctic", include_str!("../../presets/arctic.json")),
    ("dbrx", include_str!("../../presets/dbrx.json")),
    (
        "deepseek-v2-lite",
        include_str!("../../presets/deepseek-v2-lite.json"),
    ),
    (
        "gemma4-26b-a4b",
        include_str!("../../presets/gemma4-26b-a4b.json"),
    ),
    (
        "glm-4.5-air",
        include_str!("../../presets/glm-4.5-air.json"),
    ),
    (
        "granite-4-h-tiny",
        include_str!("../../presets/granite-4-h-tiny.json"),
    ),
    (
        "lfm2-8b-a1b",
        include_str!("../../presets/lfm2-8b-a1b.json"),
    ),
    ("minimax-m2", include_str!("../../presets/minimax-m2.json")),
    (
        "nemotron-3-nano-30b-a3b",
        include_str!("../../presets/nemotron-3-nano-30b-a3b.json"),
    ),
    (
        "qwen35moe-35b-a3b",
        include_str!("../../presets/qwen35moe-35b-a3b.json"),
    ),
];

impl Description {
    /// Returns the names that [`Description::like`] accepts.
    pub fn presets() -> impl Iterator<Item = &'static str> {
        FILES.iter().map(|(name, _)| *name)
    }

    /// Returns the description of the published model with this name in [`Description::presets`].
    pub fn like(name: &str) -> Option<Description> {
        let (_, json) = FILES.iter().find(|(preset, _)| *preset == name)?;
        serde_json::from_str(json).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_small_and_valid() {
        for (name, json) in FILES {
            assert!(json.len() <= 4000, "{name}: {}", json.len());
            let description: Result<Description, _> = serde_json::from_str(json);
            assert!(description.is_ok(), "{name}: {description:?}");
        }
    }
}
