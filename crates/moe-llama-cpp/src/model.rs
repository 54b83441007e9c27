//! A loaded model of llama.cpp and its vocabulary.

use std::ffi::{CString, c_char};
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
        let unusable = || Error::Path {
            path: path.to_owned(),
        };
        let c_path = CString::new(path.to_str().ok_or_else(unusable)?).map_err(|_| unusable())?;
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
        let mut model = Model { raw, n_vocab: 0 };
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
    /// The text is too long.
    pub fn tokenize(&self, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<u32>> {
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
        if token as usize >= self.n_vocab {
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

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: loaded by `load` and freed once; contexts borrow the model, so none exists.
        unsafe { sys::llama_model_free(self.raw.as_ptr()) };
    }
}
