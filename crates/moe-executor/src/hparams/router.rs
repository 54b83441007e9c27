//! How a router computes probabilities and selects experts.

/// Function from router scores to probabilities.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gating {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each score.
    Sigmoid,
    /// Softmax over the scores of the selected experts only (gpt-oss).
    SoftmaxOfSelected,
    /// Sigmoid of each score; the scores select the experts (Llama 4).
    SigmoidOfSelected,
}

/// Group-limited selection: experts are selected from the best groups only ("DeepSeek-V3 Technical Report", 2024, section
/// 2.1.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Groups {
    /// Number of groups. All have the same size of at least two experts.
    pub n: usize,
    /// Groups per token: those with the highest sum of their two best experts.
    pub n_used: usize,
}

impl Groups {
    /// Whether the groups divide `n_expert` experts as documented.
    pub fn divide(self, n_expert: usize) -> bool {
        self.n > 0
            && n_expert.is_multiple_of(self.n)
            && n_expert / self.n >= 2
            && (1..=self.n).contains(&self.n_used)
    }
}
