//! `buffers`: the buffers of a run and their memory over time.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::bail;
use moe_files::text::counted;
use moe_trace::bounded::is_present;
use moe_trace::buffers::{self, BufferEvent, Timeline, TimelineBuffer};
use moe_trace::{Manifest, TRACE_FILE, Trace};

use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::files::{self, OutputPath};
use crate::output::{self, Format, Table, human_bytes};
use crate::plot;
use crate::progress::Progress;

/// Show the buffers of a run and their memory over time
///
/// Reads the buffers.jsonl of a run. Prints a summary of the peak; with -o, one row per buffer.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  moe-analyze buffers runs/first --plot memory.svg")]
pub struct Args {
    /// Run directory, its buffers.jsonl, or a buffer_stats.jsonl of the TensorAccessLog tracer (github.com/ErsjanKeri/BSC)
    run: PathBuf,
    /// Print one row per buffer in this format, instead of the summary
    #[arg(short, long = "output", value_name = "FORMAT")]
    output: Option<Format>,
    /// Write the buffer timeline as JSON for the TensorAccessLog viewers (github.com/ErsjanKeri/BSC)
    #[arg(long, value_name = "FILE.json")]
    out: Option<OutputPath>,
    /// Plot the memory over time; the extension selects the format: png, svg
    #[arg(long, value_name = "FILE.png|svg")]
    plot: Option<OutputPath>,
    /// Replace the files of --out and --plot if they exist
    #[arg(long)]
    force: bool,
}

pub fn run(args: Args, ctx: &Context) -> anyhow::Result<ExitStatus> {
    if let Some(plot) = &args.plot {
        plot::check_extension(plot)?;
    }
    if let Some(out) = &args.out {
        files::require_extension(out, "json")?;
    }
    for out in args.out.iter().chain(&args.plot) {
        files::check_output(out, args.force)?;
    }
    let path = events_path(&args.run)?;
    let progress = Progress::reading(ctx, &path);
    let events = buffers::read(&path)?;
    drop(progress);
    if let Some(warning) = buffers::truncation(&path)? {
        ctx.note(warning);
    }
    if events.is_empty() {
        bail!(
            "{} contains no buffer events; record the run again with this version",
            path.display()
        );
    }
    let (timeline, n_unknown) = Timeline::new(&events);
    if n_unknown > 0 {
        ctx.note(format_args!(
            "warning: {}: ignored {} of buffers that were not allocated",
            path.display(),
            counted(n_unknown, "dealloc event")
        ));
    }
    let mut outputs = Vec::new();
    if let Some(out) = &args.out {
        outputs.push(files::prepare(out, args.force, |file| {
            serde_json::to_writer(&mut *file, &timeline)?;
            Ok(file.write_all(b"\n")?)
        })?);
    }
    if let Some(plot) = &args.plot {
        let end_ms = end_ms(&args.run, &events)?;
        let figure = plot::occupancy(&title(&args.run), &timeline, end_ms);
        outputs.push(figure.prepare(plot, args.force)?);
    }
    files::commit(outputs)?;
    if let Some(out) = &args.out {
        ctx.note(format_args!("wrote {}", out.display()));
    }
    if let Some(plot) = &args.plot {
        ctx.note(format_args!("wrote {}", plot.display()));
    }
    output::to_stdout(args.output, |stdout| match args.output {
        None => print_summary(stdout, &timeline),
        Some(format) => print_buffers(stdout, &timeline, format),
    })?;
    Ok(ExitStatus::Done)
}

/// Returns the path of the events: the file itself, or `buffers.jsonl` in a run directory.
fn events_path(path: &Path) -> anyhow::Result<PathBuf> {
    if !path.is_dir() {
        return Ok(path.to_owned());
    }
    Manifest::of_run(path)?;
    let events = path.join(buffers::FILE_NAME);
    if !is_present(&events) {
        bail!(
            "{} has no {}; pass a run that this version recorded, or a buffer_stats.jsonl",
            path.display(),
            buffers::FILE_NAME
        );
    }
    Ok(events)
}

/// Returns the end of the run in milliseconds on the clock of its events, or `None` without a trace.
fn end_ms(path: &Path, events: &[BufferEvent]) -> anyhow::Result<Option<f64>> {
    let trace = path.join(TRACE_FILE);
    if !is_present(&trace) {
        return Ok(None);
    }
    let trace = Trace::open(trace)?;
    let last = trace.last_record();
    Ok(last.and_then(|last| buffers::end_of_run_ms(events, last)))
}

fn title(path: &Path) -> String {
    let name = path.file_name().unwrap_or(path.as_os_str());
    name.to_string_lossy().into_owned()
}

/// Buffers of one usage at the time of peak memory.
struct AtPeak {
    usage: &'static str,
    n: u64,
    bytes: u64,
}

fn print_summary(out: &mut dyn Write, timeline: &Timeline) -> std::io::Result<()> {
    let metadata = &timeline.metadata;
    let mut at_peak: Vec<AtPeak> = Vec::new();
    for buffer in timeline.at_peak() {
        let usage = buffer.usage_name;
        let place = at_peak.iter().position(|row| row.usage == usage);
        let place = place.unwrap_or_else(|| {
            let (n, bytes) = (0, 0);
            at_peak.push(AtPeak { usage, n, bytes });
            at_peak.len() - 1
        });
        at_peak[place].n += 1;
        at_peak[place].bytes = at_peak[place].bytes.saturating_add(buffer.size);
    }
    writeln!(
        out,
        "{} in {:.1} ms; peak memory {} ({} bytes)\n",
        counted(metadata.total_events, "event"),
        metadata.duration_ms,
        human_bytes(metadata.peak_occupancy_bytes),
        metadata.peak_occupancy_bytes,
    )?;
    Table::of(&at_peak)
        .shown("usage at the peak", |row| row.usage)
        .shown("buffers", |row| row.n)
        .shown("size (bytes)", |row| row.bytes)
        .shown("size", |row| human_bytes(row.bytes))
        .write(out, Format::Table)?;
    let mut largest: Vec<&TimelineBuffer> = timeline.at_peak();
    largest.sort_by_key(|buffer| std::cmp::Reverse(buffer.size));
    writeln!(out)?;
    Table::of(largest.into_iter().take(10))
        .shown("largest buffers", |buffer| buffer.name.as_str())
        .shown("usage", |buffer| buffer.usage_name)
        .shown("backend", |buffer| buffer.backend.as_str())
        .shown("size (bytes)", |buffer| buffer.size)
        .shown("size", |buffer| human_bytes(buffer.size))
        .write(out, Format::Table)
}

fn print_buffers(out: &mut dyn Write, timeline: &Timeline, format: Format) -> std::io::Result<()> {
    Table::of(&timeline.buffers)
        .column("buffer_id", "buffer", |buffer| buffer.id)
        .column("name", "name", |buffer| buffer.name.as_str())
        .column("size", "size (bytes)", |buffer| buffer.size)
        .column("backend", "backend", |buffer| buffer.backend.as_str())
        .column("usage", "usage", |buffer| buffer.usage_name)
        .column("layer_id", "layer", |buffer| buffer.layer)
        .column("alloc_time_ms", "allocated (ms)", |buffer| {
            buffer.alloc_time_ms
        })
        .column("dealloc_time_ms", "freed (ms)", |buffer| {
            buffer.dealloc_time_ms
        })
        .write(out, format)
}
