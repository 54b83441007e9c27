//! Options that an environment variable can set, too.

use std::error::Error;
use std::ffi::OsStr;

use clap::builder::TypedValueParser;
use clap::parser::ValueSource;
use clap::{Arg, Command};

use crate::option_values;

/// A variable whose value is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid value '{text}' for {name}: {reason}")]
pub struct InvalidVariable {
    name: String,
    text: String,
    reason: String,
}

/// The value of an option, else of its variable, else the default.
///
/// A variable may be set for all runs. An invalid one is therefore an error only where its value is needed.
#[derive(Debug, Clone)]
pub struct EnvOption<T> {
    value: Result<T, InvalidVariable>,
    is_given: bool,
}

impl<T: Clone> EnvOption<T> {
    /// The value.
    pub fn get(&self) -> Result<T, InvalidVariable> {
        self.value.clone()
    }

    /// Whether the command line contains the option.
    pub fn is_given(&self) -> bool {
        self.is_given
    }
}

/// Parses an [`EnvOption`] with a function from text.
#[derive(Clone)]
pub struct EnvOptionParser<P>(pub P);

impl<P, T, E> TypedValueParser for EnvOptionParser<P>
where
    P: Fn(&str) -> Result<T, E> + Clone + Send + Sync + 'static,
    T: Clone + Send + Sync + 'static,
    E: Error + Send + Sync + 'static,
{
    type Value = EnvOption<T>;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        text: &OsStr,
    ) -> Result<Self::Value, clap::Error> {
        self.parse_ref_(command, arg, text, ValueSource::CommandLine)
    }

    fn parse_ref_(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        text: &OsStr,
        source: ValueSource,
    ) -> Result<Self::Value, clap::Error> {
        if let (ValueSource::EnvVariable, Some(name)) = (source, arg.and_then(Arg::get_env)) {
            let text = text.to_string_lossy();
            return Ok(EnvOption {
                value: (self.0)(&text).map_err(|error| InvalidVariable {
                    name: name.to_string_lossy().into_owned(),
                    reason: option_values::wanted(&error)
                        .map_or_else(|| error.to_string(), str::to_owned),
                    text: text.into_owned(),
                }),
                is_given: false,
            });
        }
        Ok(EnvOption {
            value: Ok(TypedValueParser::parse_ref(&self.0, command, arg, text)?),
            is_given: source == ValueSource::CommandLine,
        })
    }
}
