//! Compilation of templates that may be hostile.
//!
//! The template engine parses and compiles an expression by recursion, one level for each operator, and visits all levels below each
//! level. Its own limit covers only parentheses, lists and blocks. Therefore the code of a tag is limited, and templates are compiled
//! on a thread whose stack suffices for one level per byte.

use minijinja::Environment;
use moe_files::stack::with_stack;

use super::error::ChatError;
use super::{NAME, environment, generation};

/// Maximum number of bytes of code in a tag or an expression, without spaces and strings. Known templates have less than a quarter.
const MAX_TAG_CODE: usize = 4096;

/// Stack for each byte of the template, more than the frames of a level, also in builds without optimization.
const STACK_PER_BYTE: usize = 8 << 10;

/// Stack for templates of any size.
const MIN_STACK: usize = 16 << 20;

/// Returns an environment with the compiled template `source`.
pub(super) fn compile(source: &str) -> Result<Environment<'static>, ChatError> {
    if let Some(line) = generation::first_long_tag(source, MAX_TAG_CODE) {
        let max = MAX_TAG_CODE;
        return Err(ChatError::TooComplex { line, max });
    }
    let source = generation::replace(source);
    let stack_size = MIN_STACK + source.len() * STACK_PER_BYTE;
    // The tree of the template is dropped on this thread, too.
    let run = || -> Result<_, ChatError> {
        let mut environment = environment::new();
        environment
            .add_template_owned(NAME, source)
            .map_err(|error| ChatError::compile(&error))?;
        Ok(environment)
    };
    with_stack("chat template", stack_size, run)?
}
