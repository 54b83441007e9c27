//! Options that an environment variable can set.

use std::error::Error;
use std::ffi::OsStr;

use clap::builder::TypedValueParser;
use clap::parser::ValueSource;
use clap::{Arg, Command};

use crate::option_values;

/// An environment variable with an invalid value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid value '{text}' for {name}: {reason}")]
pub struct InvalidVariable {
    name: String,
    text: String,
    reason: String,
}

/// The value of an option, else of its variable, else the default.
///
/// A variable can be set for all commands. An invalid value is an error only in a command that needs it.
#[derive(Debug, Clone)]
pub struct EnvOption<T> {
    value: Result<T, InvalidVariable>,
    is_given: bool,
}

impl<T: Clone> EnvOption<T> {
    /// Returns the value, or the error of an invalid variable.
    pub fn get(&self) -> Result<T, InvalidVariable> {
        self.value.clone()
    }

    /// Returns whether the command line contains the option.
    pub fn is_given(&self) -> bool {
        self.is_given
    }
}

/// Parser of an [`EnvOption`] whose text the function parses.
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
                    reason: option_values::expected_number(&error)
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
