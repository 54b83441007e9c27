/** Properties and notes of an input. */
import type { Context, View } from "../context";
import type { Dataset } from "../dataset";
import { h } from "../dom";
import { bytes, count, time } from "../format";

export function createOverview({ report, datasets }: Context, data: Dataset): View {
  const { input } = data;
  const other = datasets.find((d) => d !== data);
  const theirs = new Map(other?.input.properties);
  const rows: [string, string][] = [...input.properties];
  const has = new Set(rows.map(([key]) => key));
  const add = (key: string, value: string) => {
    if (!has.has(key)) rows.push([key, value]);
  };
  if (input.model) add("model", input.model);
  add("tokens", count(input.tokens.text.length));
  if (input.files.length) add("model size", bytes(input.files.reduce((sum, f) => sum + f.size, 0)));
  if (input.time_unit === "ns") add("duration", time(input.duration, "ns"));
  const table = h("table", { class: "properties" }, h("caption", { class: "visually-hidden" }, `Properties of ${input.name}`),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "property"), h("th", { scope: "col" }, "value"))));
  const body = h("tbody");
  for (const [key, value] of rows) {
    const differs = other && theirs.has(key) && theirs.get(key) !== value;
    body.append(h("tr", { class: differs ? "differs" : null }, h("th", { scope: "row" }, key), h("td", {}, value, differs ? h("span", { class: "badge" }, "differs") : null)));
  }
  table.append(body);
  const notes = data.index === 0 ? [...report.notes, ...input.notes] : input.notes;
  const element = h("div", { class: "overview scroll", tabindex: "0", role: "region", "aria-label": `Properties and notes of ${input.name}` },
    h("h3", {}, "Properties"), table,
    notes.length ? h("h3", {}, "Notes") : null,
    notes.length ? h("ul", { class: "notes" }, ...notes.map((n) => h("li", {}, n))) : null,
    h("p", { class: "muted" }, `Written by ${report.program}.`));
  return { element, update() {} };
}
