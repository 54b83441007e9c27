//! A loaded model of llama.cpp and its vocabulary.

use std::collections::{HashMap, HashSet};
use std::ffi::{CString, c_char};
use std::path::Path;
use std::ptr::NonNull;

use llama_cpp_sys_2 as sys;
use moe_gguf::Gguf;

use crate::backend;
use crate::error::{Error, Result};
use crate::header;

/// A loaded model. Its weights are memory-mapped, except those that llama.cpp repacks for the CPU.
pub struct Model {
    pub(crate) raw: NonNull<sys::llama_model>,
    n_vocab: usize,
    /// Whether the tokens have texts. Without texts, llama.cpp aborts in all functions for texts.
    has_texts: bool,
    missing: Option<MissingBytes>,
    /// Adapters of all contexts with their scales. They are freed with the model.
    adapters: Vec<(NonNull<sys::llama_adapter_lora>, f32)>,
    /// Number of tensors that adapters change: tensors without experts, and tensors of experts.
    n_adapted: [u64; 2],
}

/// The bytes without a token in a SentencePiece vocabulary. llama.cpp throws an exception, which ends the process, if it falls back
/// to one of them.
struct MissingBytes {
    has_token: [bool; 256],
    /// Characters that are tokens.
    chars: HashSet<char>,
}

impl MissingBytes {
    /// Returns `None` if no byte lacks a token, or the vocabulary is of another kind.
    fn new(gguf: &Gguf) -> Option<MissingBytes> {
        let metadata = gguf.metadata();
        let is_spm = matches!(metadata.str("tokenizer.ggml.model"), Ok(Some("llama")));
        let tokens = metadata.strings("tokenizer.ggml.tokens").ok()??;
        if !is_spm {
            return None;
        }
        let mut missing = MissingBytes {
            has_token: [false; 256],
            chars: HashSet::new(),
        };
        let names: HashMap<String, u8> = (0..=255).map(|b| (format!("<0x{b:02X}>"), b)).collect();
        for token in tokens {
            let mut chars = token.chars();
            if let (Some(c), None) = (chars.next(), chars.next()) {
                missing.chars.insert(c);
            } else if let Some(&byte) = names.get(token) {
                missing.has_token[usize::from(byte)] = true;
            }
        }
        missing.has_token.contains(&false).then_some(missing)
    }

    /// The first character of `text` that is not a token and has a byte without a token.
    fn first_in(&self, text: &str) -> Option<char> {
        // llama.cpp replaces spaces, and adds one before the text.
        let mut chars = std::iter::once(' ').chain(text.chars());
        let is_missing = |&c: &char| {
            let c = if c == ' ' { '\u{2581}' } else { c };
            let mut buffer = [0; 4];
            let mut bytes = c.encode_utf8(&mut buffer).bytes();
            !self.chars.contains(&c) && bytes.any(|byte| !self.has_token[usize::from(byte)])
        };
        chars.find(is_missing).filter(|_| !text.is_empty())
    }
}

/// Whether the file has no vocabulary.
fn is_without_texts(gguf: &Gguf) -> bool {
    let model = gguf.metadata().str("tokenizer.ggml.model");
    matches!(model, Ok(Some("none" | "no_vocab")))
}

impl Model {
    /// Loads the model of `gguf` on the CPU. For a sharded model, `gguf` has the path of the first file.
    ///
    /// # Errors
    /// llama.cpp cannot read or run the model, the model has an encoder, or llama.cpp would abort on its header.
    pub fn load(gguf: &Gguf) -> Result<Model> {
        header::check(gguf)?;
        let path = gguf.files()[0].path.as_path();
        backend::start();
        let c_path = c_path(path)?;
        // SAFETY: the function has no preconditions.
        let mut params = unsafe { sys::llama_model_default_params() };
        params.n_gpu_layers = 0;
        backend::forget_log();
        // SAFETY: the path is NUL-terminated, and the parameters are llama.cpp's defaults except for one number.
        let raw = unsafe { sys::llama_model_load_from_file(c_path.as_ptr(), params) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::Load {
            path: path.to_owned(),
            reason: backend::logged(),
        })?;
        let mut model = Model {
            raw,
            n_vocab: 0,
            has_texts: !is_without_texts(gguf),
            missing: MissingBytes::new(gguf),
            adapters: Vec::new(),
            n_adapted: [0; 2],
        };
        // SAFETY: the model is valid.
        if unsafe { sys::llama_model_has_encoder(raw.as_ptr()) } {
            return Err(Error::Encoder {
                path: path.to_owned(),
            });
        }
        // SAFETY: the vocabulary lives as long as the model.
        let n_vocab = unsafe { sys::llama_vocab_n_tokens(model.vocab()) };
        model.n_vocab = usize::try_from(n_vocab).unwrap_or(0);
        Ok(model)
    }

    /// Loads the model of `gguf` like [`Model::load`], with LoRA adapters and their scales. All contexts use them.
    ///
    /// # Errors
    /// Those of [`Model::load`]; llama.cpp cannot load an adapter, for example because it is for another model.
    pub fn load_with_adapters(gguf: &Gguf, adapters: &[(&Gguf, f32)]) -> Result<Model> {
        let mut model = Model::load(gguf)?;
        for (adapter, scale) in adapters {
            let path = adapter.files()[0].path.as_path();
            let c_path = c_path(path)?;
            backend::forget_log();
            // SAFETY: the model is valid, and the path is NUL-terminated.
            let raw = unsafe { sys::llama_adapter_lora_init(model.raw.as_ptr(), c_path.as_ptr()) };
            let raw = NonNull::new(raw).ok_or_else(|| Error::Adapter {
                path: path.to_owned(),
                reason: backend::logged(),
            })?;
            model.adapters.push((raw, *scale));
            for tensor in adapter.tensors() {
                if tensor.name.ends_with(".lora_a") {
                    model.n_adapted[usize::from(tensor.name.contains("_exps."))] += 1;
                }
            }
        }
        Ok(model)
    }

    /// Number of tensors that adapters change: tensors without experts, and tensors of experts.
    pub(crate) fn n_adapted(&self) -> [u64; 2] {
        self.n_adapted
    }

    /// The adapters, and their scales in the same order.
    pub(crate) fn adapters(&self) -> (Vec<*mut sys::llama_adapter_lora>, Vec<f32>) {
        let adapters = self.adapters.iter();
        adapters.map(|(raw, scale)| (raw.as_ptr(), *scale)).unzip()
    }

    fn vocab(&self) -> *const sys::llama_vocab {
        // SAFETY: the model is valid.
        unsafe { sys::llama_model_get_vocab(self.raw.as_ptr()) }
    }

    /// Number of tokens in the vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.n_vocab
    }

    /// Context length of the model's training.
    pub fn n_ctx_train(&self) -> usize {
        // SAFETY: the model is valid.
        let n_ctx = unsafe { sys::llama_model_n_ctx_train(self.raw.as_ptr()) };
        usize::try_from(n_ctx).unwrap_or(0)
    }

    /// Whether a token is an end-of-generation token.
    pub fn is_eog(&self, token: u32) -> bool {
        // SAFETY: the vocabulary lives as long as the model, and the token is in it.
        (token as usize) < self.n_vocab
            && unsafe { sys::llama_vocab_is_eog(self.vocab(), token as i32) }
    }

    /// The tokens of a text. `add_special` adds the special tokens of the vocabulary (BOS, EOS); `parse_special` recognizes the names
    /// of control tokens in the text.
    ///
    /// # Errors
    /// The text is too long, or contains a character for which the vocabulary has no tokens, or the file has no vocabulary.
    pub fn tokenize(&self, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<u32>> {
        if !self.has_texts {
            return Err(Error::NoVocabulary);
        }
        let missing = self.missing.as_ref();
        if let Some(character) = missing.and_then(|missing| missing.first_in(text)) {
            return Err(Error::NoToken { character });
        }
        let error = || Error::Tokenize { bytes: text.len() };
        let n_bytes = i32::try_from(text.len()).map_err(|_| error())?;
        let mut tokens = vec![0; text.len() + 2];
        loop {
            let n_max = i32::try_from(tokens.len()).map_err(|_| error())?;
            // SAFETY: the text has `n_bytes` bytes, and `tokens` has `n_max` elements.
            let n = unsafe {
                sys::llama_tokenize(
                    self.vocab(),
                    text.as_ptr().cast::<c_char>(),
                    n_bytes,
                    tokens.as_mut_ptr(),
                    n_max,
                    add_special,
                    parse_special,
                )
            };
            // A negative result is the needed number of tokens, negated; i32::MIN reports an overflow.
            match usize::try_from(n) {
                Ok(n) => {
                    tokens.truncate(n);
                    return Ok(tokens.into_iter().map(|token| token as u32).collect());
                }
                Err(_) if n == i32::MIN => return Err(error()),
                Err(_) => tokens.resize(n.unsigned_abs() as usize, 0),
            }
        }
    }

    /// The bytes of a token; the name of a control token. Empty for an id outside the vocabulary.
    pub fn piece(&self, token: u32) -> Vec<u8> {
        if token as usize >= self.n_vocab || !self.has_texts {
            return Vec::new();
        }
        let mut bytes = vec![0u8; 64];
        loop {
            // SAFETY: the length is that of the buffer, and the token is in the vocabulary.
            let n = unsafe {
                sys::llama_token_to_piece(
                    self.vocab(),
                    token as i32,
                    bytes.as_mut_ptr().cast::<c_char>(),
                    bytes.len() as i32,
                    0,
                    true,
                )
            };
            // A negative result is the needed number of bytes, negated.
            match usize::try_from(n) {
                Ok(n) => {
                    bytes.truncate(n);
                    return bytes;
                }
                Err(_) => bytes.resize(n.unsigned_abs() as usize, 0),
            }
        }
    }
}

/// A path as llama.cpp opens it.
fn c_path(path: &Path) -> Result<CString> {
    let unusable = || Error::Path {
        path: path.to_owned(),
    };
    CString::new(path.to_str().ok_or_else(unusable)?).map_err(|_| unusable())
}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: loaded by `load` and freed once; contexts borrow the model, so none exists.
        unsafe { sys::llama_model_free(self.raw.as_ptr()) };
    }
}
