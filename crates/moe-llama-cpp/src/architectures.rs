//! MoE architectures of llama.cpp.

/// Architectures of text generation whose models can have experts in llama.cpp, sorted by name.
///
/// Source: the names in `LLM_ARCH_NAMES` of `src/llama-arch.cpp` (llama-cpp-sys-2 0.1.161) whose `load_arch_tensors` in
/// `src/models/` creates tensors of experts (`ffn_*_exps`), and whose graph computes them (`build_moe_ffn`). Omitted are
/// models of embeddings (`llama-embed`, `nomic-bert-moe`), diffusion models (`llada-moe`, `rnd1`), draft models (`dflash`),
/// and names that share a loader but have no experts (`ernie4_5`, `lfm2`, `paddleocr`, `refact`).
pub const MOE_ARCHITECTURES: &[&str] = &[
    "afmoe",
    "arctic",
    "bailingmoe",
    "bailingmoe2",
    "bailingmoe3",
    "cohere2moe",
    "dbrx",
    "deepseek",
    "deepseek2",
    "deepseek2-ocr",
    "deepseek32",
    "deepseek4",
    "dots1",
    "dots3note",
    "ernie4_5-moe",
    "exaone-moe",
    "gemma4",
    "glm-dsa",
    "glm4moe",
    "glm5-next",
    "gpt-oss",
    "granite",
    "granite_swa",
    "granitehybrid",
    "granitemoe",
    "grok",
    "grovemoe",
    "hunyuan-moe",
    "hy_v3",
    "hy_v4",
    "jamba",
    "kimi-k3",
    "kimi-linear",
    "laguna",
    "lfm2moe",
    "llama",
    "llama4",
    "maple",
    "mellum",
    "mimo2",
    "minicpm",
    "minimax-01",
    "minimax-m2",
    "minimax-m3",
    "mistral3",
    "mistral4",
    "nemotron_h",
    "nemotron_h_moe",
    "olmoe",
    "phimoe",
    "qwen2moe",
    "qwen35moe",
    "qwen3moe",
    "qwen3next",
    "qwen3vlmoe",
    "qwen4exp",
    "smallthinker",
    "step35",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted_and_unique() {
        assert!(MOE_ARCHITECTURES.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn contains_the_architectures_of_the_executor() {
        for name in moe_executor::architectures() {
            assert!(MOE_ARCHITECTURES.contains(&name), "{name}");
        }
    }
}
