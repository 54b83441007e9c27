//! Faults of LoRA adapters.

/// Why a file cannot be used as an adapter of a model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterFault {
    /// The file is not an adapter.
    #[error(
        "the file is not an adapter: `general.type` is `{found}`, not `adapter`; convert the adapter with convert_lora_to_gguf.py"
    )]
    NotAnAdapter {
        /// Value of `general.type`; empty if the key is missing.
        found: String,
    },
    /// The adapter is of another kind.
    #[error("`adapter.type` is `{found}`, but only adapters of type `lora` are supported")]
    Kind {
        /// Value of `adapter.type`; empty if the key is missing.
        found: String,
    },
    /// The adapter is for models of another architecture.
    #[error(
        "the adapter is for models of architecture `{found}`, but the model has architecture `{expected}`; pass an adapter of this \
         model"
    )]
    Architecture {
        /// Value of `general.architecture`.
        found: String,
        /// Architecture of the model.
        expected: String,
    },
    /// The adapter applies to the tokens after an invocation sequence only (aLoRA).
    #[error(
        "the adapter is applied after its invocation tokens only (`{key}`), which is not supported; pass a LoRA adapter without them"
    )]
    Activated {
        /// The GGUF key.
        key: String,
    },
    /// The factor is not finite.
    #[error("the scale of the adapter is {found}; pass a finite number")]
    Scale {
        /// The factor.
        found: String,
    },
    /// The adapter changes nothing.
    #[error("the adapter has no tensors NAME.lora_a and NAME.lora_b; convert it again")]
    Empty,
    /// The name of a tensor does not end with `.lora_a` or `.lora_b`.
    #[error("tensor `{tensor}` is neither NAME.lora_a nor NAME.lora_b; convert the adapter again")]
    Suffix {
        /// Tensor name.
        tensor: String,
    },
    /// One matrix of a pair is missing.
    #[error("tensor `{tensor}` is missing; download or convert the adapter again")]
    MissingTensor {
        /// Name of the missing tensor.
        tensor: String,
    },
    /// The model does not have a tensor that the adapter changes.
    #[error("the model has no tensor `{tensor}`; the adapter is for another base model")]
    UnknownTensor {
        /// Tensor name.
        tensor: String,
    },
    /// The shapes of a pair do not match the tensor of the model.
    #[error(
        "`{tensor}.lora_a` of shape {a:?} and `{tensor}.lora_b` of shape {b:?} do not match the tensor of the model, which has shape \
         {model:?}; the adapter is for another base model"
    )]
    Shape {
        /// Tensor name.
        tensor: String,
        /// Shape of the first matrix, `ne` order.
        a: Vec<u64>,
        /// Shape of the second matrix.
        b: Vec<u64>,
        /// Shape of the tensor of the model.
        model: Vec<u64>,
    },
    /// An adapter of a tensor that the executor or llama.cpp does not apply.
    #[error("the adapter changes tensor `{tensor}`: {reason}")]
    NotApplied {
        /// Tensor name.
        tensor: String,
        /// Why it is not applied.
        reason: &'static str,
    },
}
