//! Advice for errors of libraries: which command-line option fixes them.

use std::error::Error;
use std::io;
use std::sync::Arc;

use moe_analysis::{accesses, hotness, simulate, survey};
use moe_foreign::{ExportError, ForeignError, Missing};
use moe_placement::learn;
use moe_trace::TableFault;

const EXISTS: &str = "pass --force to replace it, or use another path";

/// The same words as in the errors of `moe-trace`.
const FULL: &str = "free disk space or choose another directory";

/// For models without a vocabulary.
const TOKEN_IDS: &str = "a file for `record --prompts` has lines {\"tokens\": [ids]}";

/// For models that the executor does not run.
const OTHER_ENGINE: &str = "`record` and `bench` use it with --engine llama.cpp";

/// Returns the options that provide information missing from a trace.
pub fn for_missing(missing: Missing) -> &'static str {
    match missing {
        Missing::TopK => "pass --top-k or --model",
        Missing::Layers => "pass --model",
    }
}

/// Returns the advice for an error, or for the first of its causes that has advice.
pub fn advice(error: &anyhow::Error) -> Option<&'static str> {
    error.chain().find_map(of_cause)
}

/// Returns the message of an error about a file of a run, with its advice.
pub fn with_advice(error: &moe_trace::Error) -> String {
    match of_trace(error) {
        Some(advice) => format!("{error}; {advice}"),
        None => error.to_string(),
    }
}

fn of_cause(error: &(dyn Error + 'static)) -> Option<&'static str> {
    if let Some(error) = error.downcast_ref() {
        return of_trace(error);
    }
    if let Some(moe_files::Error::Exists { .. }) = error.downcast_ref() {
        return Some(EXISTS);
    }
    if let Some(error) = error.downcast_ref() {
        return of_foreign(error);
    }
    if let Some(ExportError::Read(error)) = error.downcast_ref() {
        return of_foreign(error);
    }
    if let Some(error) = error.downcast_ref() {
        return of_hotness(error);
    }
    if let Some(error) = error.downcast_ref() {
        return of_survey(error);
    }
    if let Some(error) = error.downcast_ref() {
        return of_engine(error);
    }
    if let Some(error) = error.downcast_ref() {
        return of_executor(error);
    }
    if let Some(error) = error.downcast_ref() {
        return of_report(error);
    }
    if let Some(moe_executor::tokenizer::Error::NoVocabulary) = error.downcast_ref() {
        return Some(TOKEN_IDS);
    }
    #[cfg(feature = "llama-cpp")]
    if let Some(moe_llama_cpp::Error::NoVocabulary) = error.downcast_ref() {
        return Some(TOKEN_IDS);
    }
    #[cfg(feature = "llama-cpp")]
    if let Some(moe_llama_cpp::Error::Context { .. }) = error.downcast_ref() {
        return Some("reduce --ctx-size, or change --cache-type-k and --cache-type-v");
    }
    if let Some(accesses::Error::NoMap { .. }) = error.downcast_ref() {
        return Some("pass the model with --model FILE.gguf");
    }
    if let Some(simulate::Error::NoSize { .. }) = error.downcast_ref() {
        return Some("pass the model with --model, or a table of expert sizes with --sizes");
    }
    if let Some(learn::Error::Json(_)) = error.downcast_ref() {
        return Some("`hotness --out` writes learn files");
    }
    match write_error(error)? {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Some(FULL),
        _ => None,
    }
}

/// Returns the kind of an I/O error.
fn write_error(error: &(dyn Error + 'static)) -> Option<io::ErrorKind> {
    if let Some(error) = error.downcast_ref::<io::Error>() {
        return Some(error.kind());
    }
    if let Some(error) = error.downcast_ref::<Arc<io::Error>>() {
        return Some(error.kind());
    }
    let error: &serde_json::Error = error.downcast_ref()?;
    error.io_error_kind()
}

fn of_engine(error: &moe_engine::Error) -> Option<&'static str> {
    match error {
        moe_engine::Error::Trace(error) => of_trace(error),
        moe_engine::Error::Engine(error) => of_cause(error.as_ref()),
        moe_engine::Error::ContextFull { .. } => Some("or raise --ctx-size"),
        moe_engine::Error::NotFinite { .. } => Some("check the weights with `gguf-map --verify`"),
        _ => None,
    }
}

fn of_executor(error: &moe_executor::Error) -> Option<&'static str> {
    match error {
        moe_executor::Error::Trace(error) => of_trace(error),
        moe_executor::Error::Architecture { .. } => Some(OTHER_ENGINE),
        moe_executor::Error::Threads { .. } => Some("reduce --threads"),
        moe_executor::Error::Cuda(_) => Some("run without the GPU: --device cpu"),
        _ => None,
    }
}

fn of_report(error: &moe_report::Error) -> Option<&'static str> {
    match error {
        moe_report::Error::Trace(error) => of_trace(error),
        moe_report::Error::Foreign(error) => of_foreign(error),
        moe_report::Error::Json(error) => of_cause(error),
        moe_report::Error::Write(error) => of_cause(error),
        _ => None,
    }
}

fn of_trace(error: &moe_trace::Error) -> Option<&'static str> {
    match error {
        moe_trace::Error::Exists { .. } => Some(EXISTS),
        moe_trace::Error::NotReplaceable { .. } => Some("--force replaces run directories only"),
        moe_trace::Error::TraceFull { .. } => Some("increase --max-trace-mib to record more"),
        moe_trace::Error::WriteTrace { .. } => Some("limit the trace with --max-trace-mib"),
        moe_trace::Error::Table { fault, .. } => of_table(fault),
        _ => None,
    }
}

fn of_table(fault: &TableFault) -> Option<&'static str> {
    match fault {
        TableFault::OtherModel => Some("`gguf-map` writes maps"),
        TableFault::OtherRun { .. } | TableFault::NoRouting => Some("`parquet` writes tables"),
        _ => None,
    }
}

fn of_foreign(error: &ForeignError) -> Option<&'static str> {
    match error {
        ForeignError::Missing { missing, .. } => Some(for_missing(*missing)),
        ForeignError::TopK { .. } => {
            Some("pass --top-k K, the number of experts per token of the traced model")
        }
        ForeignError::Operations { .. } => Some("pass the operation names with --ops FILE.csv"),
        ForeignError::Read(error) => of_trace(error),
        ForeignError::Sink(error) => of_cause(error.as_ref()),
        _ => None,
    }
}

fn of_hotness(error: &hotness::Error) -> Option<&'static str> {
    match error {
        hotness::Error::Empty { .. } => Some("or pass another --phase"),
        hotness::Error::NoPhases => Some("count both with --phase all"),
        hotness::Error::Survey(error) => of_survey(error),
        hotness::Error::Trace(error) => of_trace(error),
        _ => None,
    }
}

fn of_survey(error: &survey::Error) -> Option<&'static str> {
    match error {
        survey::Error::OnePart { .. } => Some("pass more inputs, or split by time: --split 0.5"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn advises_to_free_disk_space() {
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        assert_eq!(advice(&anyhow::Error::new(full()).context("a")), Some(FULL));
        assert_eq!(advice(&anyhow::Error::new(Arc::new(full()))), Some(FULL));
        let other = io::Error::from(io::ErrorKind::PermissionDenied);
        assert_eq!(advice(&other.into()), None);
    }

    #[test]
    fn finds_advice_in_wrapped_errors() {
        let exists = || moe_trace::Error::Exists {
            path: PathBuf::from("a"),
        };
        let force = Some(EXISTS);
        assert_eq!(advice(&exists().into()), force);
        assert_eq!(advice(&anyhow::Error::new(exists()).context("b")), force);
        assert_eq!(advice(&ForeignError::Sink(exists().into()).into()), force);
        assert_eq!(advice(&hotness::Error::Trace(exists()).into()), force);
        assert_eq!(advice(&anyhow::anyhow!("c")), None);
        let top_k = ForeignError::TopK {
            path: PathBuf::from("a"),
            at: moe_foreign::Location::Byte(8),
            reason: "b".to_owned(),
        };
        assert_eq!(
            advice(&top_k.into()),
            Some("pass --top-k K, the number of experts per token of the traced model")
        );
        let table = moe_trace::Error::Table {
            path: PathBuf::from("a"),
            fault: TableFault::OtherModel,
        };
        assert!(with_advice(&table).ends_with("of the run's model; `gguf-map` writes maps"));
        let full = || moe_engine::Error::ContextFull {
            tokens: 9,
            context: 8,
            trained: 64,
        };
        assert_eq!(advice(&full().into()), Some("or raise --ctx-size"));
        let engine = moe_engine::Error::engine(full());
        assert_eq!(advice(&engine.into()), Some("or raise --ctx-size"));
        let executor = moe_executor::Error::Trace(exists());
        assert_eq!(advice(&moe_engine::Error::from(executor).into()), force);
        assert_eq!(advice(&moe_engine::Error::engine(exists()).into()), force);
    }
}
