//! The environment of templates: syntax, filters, functions and tests as in `transformers`, with Python's behavior.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::error::Raised;
use super::{json, methods, python};

/// Maximum depth of calls. minijinja counts a call of a macro as 4 levels and more, so that macros can be nested about 30 deep, less in
/// loops. Templates call macros in macros, one call for each level of a JSON schema.
const RECURSION_LIMIT: usize = 200;

/// Returns an environment without templates.
pub(super) fn new() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_recursion_limit(RECURSION_LIMIT);
    // Only delimiters can be invalid.
    if let Ok(syntax) = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
    {
        environment.set_syntax(syntax);
    }
    // The name of the template must not select an escape format.
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_formatter(|out, state, value| match python::float(value) {
        Some(float) => Ok(out.write_str(&python::float_text(float))?),
        None => {
            json::consume(state, value)?;
            minijinja::escape_formatter(out, state, value)
        }
    });
    environment.set_unknown_method_callback(methods::call);
    environment.add_function("raise_exception", raise_exception);
    environment.add_filter("tojson", to_json);
    environment.add_filter("string", string);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_test("sequence", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Undefined
        )
    });
    environment.add_test("iterable", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::Seq
                | ValueKind::String
                | ValueKind::Map
                | ValueKind::Iterable
                | ValueKind::Undefined
        )
    });
    environment
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    let message = message.to_string();
    let error = Error::new(ErrorKind::InvalidOperation, message.clone());
    Err(error.with_source(Raised(message)))
}

/// The filter `tojson` of `transformers`: Python's `json.dumps` without escapes for non-ASCII characters.
fn to_json(state: &State, value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let style = json::Style::new(&kwargs)?;
    kwargs.assert_all_used()?;
    json::text(state, value, &style).map(Value::from)
}

/// The filter `string`: Python's `str`.
fn string(state: &State, value: &Value) -> Result<Value, Error> {
    if let Some(float) = python::float(value) {
        return Ok(Value::from(python::float_text(float)));
    }
    json::consume(state, value)?;
    Ok(Value::from(value.to_string()))
}

/// The filter `int`: like in Jinja, a value that is not a number becomes `default`.
fn int(value: &Value, default: Option<i64>, kwargs: Kwargs) -> Result<Value, Error> {
    let default = match default {
        Some(default) => default,
        None => kwargs.get::<Option<i64>>("default")?.unwrap_or(0),
    };
    let base: Option<u32> = kwargs.get("base")?;
    kwargs.assert_all_used()?;
    let text = value.as_str().map(str::trim);
    let parsed = match text {
        Some(text) => i64::from_str_radix(text, base.unwrap_or(10).clamp(2, 36))
            .ok()
            .or_else(|| text.parse::<f64>().ok().and_then(whole)),
        None if value.kind() == ValueKind::Bool => Some(value.is_true().into()),
        None => i64::try_from(value.clone())
            .ok()
            .or_else(|| python::float(value).and_then(whole)),
    };
    Ok(Value::from(parsed.unwrap_or(default)))
}

/// The integer part of a number that fits an integer.
fn whole(number: f64) -> Option<i64> {
    (number.abs() < 9e18).then_some(number as i64)
}

/// The filter `float`: like in Jinja, a value that is not a number becomes `default`.
fn float(value: &Value, default: Option<f64>) -> f64 {
    let parsed = match value.as_str() {
        Some(text) => text.trim().parse().ok(),
        None => f64::try_from(value.clone()).ok(),
    };
    parsed.or(default).unwrap_or(0.0)
}
