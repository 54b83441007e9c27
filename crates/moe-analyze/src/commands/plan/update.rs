//! `plan --update`: the experts that the fork exchanges after a request.

use std::io::{self, Write};
use std::path::Path;

use anyhow::{anyhow, bail};
use moe_files::text::counted;
use moe_placement::learn::{ExpertObservation, LearnFile, has_schema};
use moe_placement::plan::Entry;
use moe_placement::update::{Cache, Update};
use moe_trace::{ExpertId, LayerId, bounded};
use serde::Deserialize;
use serde_json::{Value, json};

use super::Args;
use crate::context::Context;
use crate::json_input;
use crate::output::{self, Format, Table};

/// Plans the update of the cache in `current` from a live report, and prints it.
pub fn run(
    args: &Args,
    current: &Path,
    live: &LearnFile,
    ranking: &[Entry],
    ctx: &Context,
) -> anyhow::Result<()> {
    let current = Current::read(current, ctx).map_err(|error| {
        let error = output::one_line(&error);
        anyhow!("{error}; pass the output of `plan -o json`, a learn file of `plan --out`, or a live report")
    })?;
    let slots = live.layer_slots();
    let mut rate = args.update_rate;
    if slots.is_none() {
        ctx.note("warning: recording is disabled in the report (`enabled`), so the fork would exchange no expert");
        rate = 0.0;
    }
    if current.n_lanes > 1 {
        ctx.note("warning: the fork does not update a cache with several lanes");
        rate = 0.0;
    }
    let n_expert = live.n_expert().filter(|&n| n > 0).unwrap_or(u64::MAX);
    let slots = slots.unwrap_or_default();
    let update = Update::new(&current.cache, ranking, &slots, n_expert, rate);
    output::to_stdout(args.output, |out| match args.output {
        Some(Format::Json) => {
            serde_json::to_writer_pretty(&mut *out, &to_json(&update, rate))?;
            writeln!(out)
        }
        format => write_exchanges(out, format, &update),
    })
}

/// Contents of a running cache.
struct Current {
    cache: Cache,
    n_lanes: usize,
}

/// The part of the output of `plan -o json` that is read.
#[derive(Deserialize)]
struct PlanFile {
    selected: Vec<Place>,
}

#[derive(Deserialize)]
struct Place {
    layer: LayerId,
    expert: ExpertId,
    #[serde(default)]
    lane: usize,
}

impl Current {
    fn read(path: &Path, ctx: &Context) -> anyhow::Result<Current> {
        let text = bounded::read_json(path)?;
        let current = Current::parse(&text, ctx);
        current.map_err(|error| anyhow!("{}: {}", path.display(), output::one_line(&error)))
    }

    fn parse(text: &str, ctx: &Context) -> anyhow::Result<Current> {
        let places: Vec<Place> = if has_schema(text).map_err(json_input::describe)? {
            experts_of(&LearnFile::parse(text)?, ctx)?
        } else {
            json_input::parse::<PlanFile>(text)?.selected
        };
        if places.is_empty() {
            bail!("the file contains no expert");
        }
        Ok(Current {
            n_lanes: places
                .iter()
                .map(|place| place.lane.saturating_add(1))
                .max()
                .unwrap_or(1),
            cache: places
                .iter()
                .map(|place| (place.layer, place.expert))
                .collect(),
        })
    }
}

/// Returns the experts in a learn file of `plan --out`, or the experts in a live report that served a slot.
fn experts_of(file: &LearnFile, ctx: &Context) -> anyhow::Result<Vec<Place>> {
    let layers = file.observations()?;
    let experts = layers.iter().flat_map(|layer| {
        layer
            .experts
            .iter()
            .map(move |expert| (layer.layer, expert))
    });
    let is_report = experts.clone().any(|(_, expert)| expert.hot > 0);
    if is_report {
        ctx.note(
            "the current cache is read from the hot counts of a report, which omit cached experts without hits; a plan (-o json) contains all",
        );
    }
    let cached = experts.filter(|(_, expert)| !is_report || expert.hot > 0);
    let place = |(layer, expert): (LayerId, &ExpertObservation)| Place {
        layer,
        expert: expert.expert,
        lane: 0,
    };
    Ok(cached.map(place).collect())
}

fn write_exchanges(out: &mut dyn Write, format: Option<Format>, update: &Update) -> io::Result<()> {
    Table::of(update.exchanges())
        .column("layer", "layer", |exchange| exchange.layer)
        .column("evict", "evict", |exchange| exchange.evict)
        .column("add", "add", |exchange| exchange.add)
        .column("evict_score", "score, evicted", |exchange| {
            exchange.evict_score
        })
        .column("add_score", "score, added", |exchange| exchange.add_score)
        .column("gain", "score gain", |exchange| exchange.gain())
        .write(out, format.unwrap_or(Format::Table))?;
    if format.is_none() {
        let served = match update.hot_slots {
            0 => "the counts contain no selections that a cache served".to_owned(),
            hot => format!(
                "the cache served {:.1} % of {}",
                100.0 * update.hit_rate(),
                counted(hot.saturating_add(update.cold_slots), "selected expert")
            ),
        };
        writeln!(
            out,
            "\n{} of {} that improve the cache of {}; {served}",
            update.exchanges().len(),
            counted(update.candidates.len() as u64, "exchange"),
            counted(update.hot_experts as u64, "expert"),
        )?;
    }
    Ok(())
}

/// Returns JSON with the key names of the fork's response, and the exchanges.
fn to_json(update: &Update, rate: f64) -> Value {
    let layers: std::collections::BTreeSet<LayerId> = update
        .exchanges()
        .iter()
        .map(|exchange| exchange.layer)
        .collect();
    let exchanges = update.exchanges().iter().map(|exchange| {
        json!({
            "layer": exchange.layer,
            "evict": exchange.evict,
            "add": exchange.add,
            "evict_score": exchange.evict_score,
            "add_score": exchange.add_score,
            "gain": exchange.gain(),
        })
    });
    json!({
        "update_rate": rate.clamp(0.0, 1.0),
        "hit_rate": update.hit_rate(),
        "hot_slots": update.hot_slots,
        "cold_slots": update.cold_slots,
        "hot_experts": update.hot_experts,
        "candidates": update.candidates.len(),
        "max_exchange": update.max_exchange,
        "exchanged": update.exchanges().len(),
        "layers_changed": layers.len(),
        "exchanges": exchanges.collect::<Vec<_>>(),
    })
}
