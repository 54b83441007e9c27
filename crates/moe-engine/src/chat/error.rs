//! Errors of chat templates.

use moe_files::stack::StackError;

use crate::BoxError;

/// Why a template cannot be compiled or rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The template is larger than every known template.
    #[error(
        "the chat template has {bytes} bytes, but the maximum is {max}; use a shorter template"
    )]
    TooLong {
        /// Size of the template.
        bytes: usize,
        /// Maximum size.
        max: usize,
    },
    /// A tag or an expression of the template has too much code.
    #[error(
        "line {line} of the chat template has an expression that is too large or nested too deeply (more than {max} bytes without spaces and texts); use a simpler template"
    )]
    TooComplex {
        /// Line of the tag in the template, from 1.
        line: usize,
        /// Maximum size of the code of a tag, in bytes.
        max: usize,
    },
    /// The thread that compiles the template cannot be started.
    #[error("there is not enough memory to compile the chat template")]
    Thread {
        /// The error of the system.
        source: std::io::Error,
    },
    /// The template engine panicked.
    #[error("the template engine failed: {message}; use another chat template")]
    Panicked {
        /// The panic message.
        message: String,
    },
    /// The template is not valid Jinja.
    #[error("line {line} of the chat template is invalid")]
    Template {
        /// Line in the template, from 1.
        line: usize,
        /// What is wrong.
        source: BoxError,
    },
    /// A message is not an object with a role.
    #[error("message {index} is not an object with a string \"role\"")]
    Message {
        /// Position in the conversation, from 0.
        index: usize,
    },
    /// The template called `raise_exception`.
    #[error("the chat template rejects the conversation: {message}")]
    Raised {
        /// The message of the template.
        message: String,
    },
    /// An expression of the template fails for these messages.
    #[error("line {line} of the chat template fails for this conversation")]
    Render {
        /// Line in the template, from 1.
        line: usize,
        /// What is wrong.
        source: BoxError,
    },
    /// The template computes or writes too much.
    #[error(
        "the chat template exceeds the limit of {limit} computing steps at line {line}; use another template, or fewer messages"
    )]
    Limit {
        /// Line in the template, from 1.
        line: usize,
        /// Maximum number of steps.
        limit: u64,
    },
}

impl From<StackError> for ChatError {
    fn from(error: StackError) -> Self {
        match error {
            StackError::Start { source } => Self::Thread { source },
            error => Self::Panicked {
                message: error.to_string(),
            },
        }
    }
}

/// The error of `raise_exception`, inside an error of the template engine.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Raised(pub String);

impl ChatError {
    /// The error of a template that does not compile.
    pub(super) fn compile(error: &minijinja::Error) -> ChatError {
        let reason = match error.detail() {
            Some(detail) => detail.to_owned(),
            None => error.kind().to_string(),
        };
        ChatError::Template {
            line: error.line().unwrap_or(1),
            source: reason.into(),
        }
    }

    /// The error of a template that does not render with `limit` steps.
    pub(super) fn render(error: minijinja::Error, limit: u64) -> ChatError {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
        while let Some(error) = cause {
            if let Some(Raised(message)) = error.downcast_ref() {
                return ChatError::Raised {
                    message: message.clone(),
                };
            }
            cause = error.source();
        }
        let line = error.line().unwrap_or(1);
        match error.kind() {
            minijinja::ErrorKind::OutOfFuel => ChatError::Limit { line, limit },
            _ if std::error::Error::source(&error).is_some() => ChatError::Render {
                line,
                source: error.into(),
            },
            kind => {
                let reason = match error.detail() {
                    Some(detail) => format!("{kind}: {detail}"),
                    None => kind.to_string(),
                };
                ChatError::Render {
                    line,
                    source: reason.into(),
                }
            }
        }
    }
}
