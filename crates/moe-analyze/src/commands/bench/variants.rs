//! What the repetitions of a test alternate between: the records of a trace, or the counters of a hot cache.

use anyhow::{anyhow, bail};
use clap::ValueEnum;
use moe_engine::Session;
use moe_files::TemporaryDirectory;
use moe_placement::perf::PerfMode;

use crate::trace_mode::TraceMode;

/// The variants of a test, at least one.
pub enum Variants {
    Traces(Vec<TraceMode>),
    Perf(Vec<PerfMode>),
}

impl Variants {
    /// # Errors
    /// Both have several values.
    pub fn new(traces: &[TraceMode], perf_modes: &[PerfMode]) -> anyhow::Result<Variants> {
        if traces.is_empty() {
            return Ok(Variants::Perf(perf_modes.to_vec()));
        }
        if perf_modes.len() > 1 {
            bail!("--trace and several values of --perf exclude each other; omit one of them");
        }
        Ok(Variants::Traces(traces.to_vec()))
    }

    /// Number of variants.
    pub fn len(&self) -> usize {
        match self {
            Variants::Traces(traces) => traces.len(),
            Variants::Perf(modes) => modes.len(),
        }
    }

    /// A directory for the trace, which is removed when it is dropped or a signal ends the process; `None` if nothing is recorded.
    pub fn trace_directory(&self) -> anyhow::Result<Option<TemporaryDirectory>> {
        match self {
            Variants::Traces(traces) if traces.iter().any(|trace| *trace != TraceMode::Off) => {
                let dir = TemporaryDirectory::create(&std::env::temp_dir(), "bench");
                let dir = dir.map_err(|error| {
                    anyhow!("no temporary directory for the trace: {error}; set TMPDIR to a writable directory")
                })?;
                Ok(Some(dir))
            }
            _ => Ok(None),
        }
    }

    /// Starts a repetition with a variant, after everything that was recorded so far is written.
    pub fn start(&self, variant: usize, session: &mut dyn Session) -> anyhow::Result<()> {
        match self {
            Variants::Traces(traces) => session.set_trace(traces[variant].mode())?,
            Variants::Perf(modes) if modes.len() > 1 => session.set_perf_mode(modes[variant]),
            Variants::Perf(_) => {}
        }
        Ok(())
    }

    /// Ends the last repetition.
    pub fn end(&self, session: &mut dyn Session) -> anyhow::Result<()> {
        if let Variants::Traces(_) = self {
            session.set_trace(None)?;
        }
        Ok(())
    }

    /// What a variant records; `None` without `--trace`.
    pub fn trace(&self, variant: usize) -> Option<String> {
        match self {
            Variants::Traces(traces) => {
                let value = traces[variant].to_possible_value()?;
                Some(value.get_name().to_owned())
            }
            Variants::Perf(_) => None,
        }
    }

    /// What a variant counts, if there are several.
    pub fn perf(&self, variant: usize) -> Option<&'static str> {
        match self {
            Variants::Perf(modes) if modes.len() > 1 => Some(modes[variant].name()),
            _ => None,
        }
    }
}
