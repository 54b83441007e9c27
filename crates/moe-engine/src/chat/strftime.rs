//! Dates in the format of C's `strftime`, in English.

use std::fmt::Write as _;

use minijinja::{Error, ErrorKind};
use time::OffsetDateTime;

/// Formats a time. Directives are those that Python has on all platforms, and `%-d` and `%e`.
pub(super) fn format(now: OffsetDateTime, format: &str) -> Result<String, Error> {
    let mut text = String::with_capacity(format.len());
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let mut directive = chars.next();
        let padded = directive != Some('-');
        if !padded {
            directive = chars.next();
        }
        let width = if padded { 2 } else { 1 };
        let hour12 = (now.hour() + 11) % 12 + 1;
        let day_of_week = now.weekday().number_days_from_sunday();
        let written = match directive {
            Some('Y') => write!(text, "{}", now.year()),
            Some('y') => write!(text, "{:0width$}", now.year().rem_euclid(100)),
            Some('m') => write!(text, "{:0width$}", u8::from(now.month())),
            Some('d') => write!(text, "{:0width$}", now.day()),
            Some('e') => write!(text, "{:width$}", now.day()),
            Some('H') => write!(text, "{:0width$}", now.hour()),
            Some('I') => write!(text, "{hour12:0width$}"),
            Some('M') => write!(text, "{:0width$}", now.minute()),
            Some('S') => write!(text, "{:0width$}", now.second()),
            Some('f') => write!(text, "{:06}", now.microsecond()),
            Some('j') if padded => write!(text, "{:03}", now.ordinal()),
            Some('j') => write!(text, "{}", now.ordinal()),
            Some('w') => write!(text, "{day_of_week}"),
            Some('B') => write!(text, "{}", now.month()),
            Some('b' | 'h') => write!(text, "{:.3}", now.month().to_string()),
            Some('A') => write!(text, "{}", now.weekday()),
            Some('a') => write!(text, "{:.3}", now.weekday().to_string()),
            Some('p') => write!(text, "{}", if now.hour() < 12 { "AM" } else { "PM" }),
            Some('F') => write!(
                text,
                "{}-{:02}-{:02}",
                now.year(),
                u8::from(now.month()),
                now.day()
            ),
            Some('T') => write!(
                text,
                "{:02}:{:02}:{:02}",
                now.hour(),
                now.minute(),
                now.second()
            ),
            Some('Z' | 'z') => Ok(()), // Python's time without a time zone
            Some('%') => write!(text, "%"),
            other => {
                let directive = other.map_or(String::new(), String::from);
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("strftime_now does not support the directive %{directive}"),
                ));
            }
        };
        if written.is_err() {
            return Err(Error::new(ErrorKind::WriteFailure, "strftime_now"));
        }
    }
    Ok(text)
}
