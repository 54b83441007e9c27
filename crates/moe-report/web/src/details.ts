/** The panel with the selection: controls to change it, and what is known about it in each input. */
import { countExperts, routeOf } from "./analysis";
import type { Context } from "./context";
import type { Dataset } from "./dataset";
import { button, field, h } from "./dom";
import { bytes, count, percent, time, visible } from "./format";
import { CLEAR, type Patch, type Selection } from "./selection";

type Fact = [string, string];

export class Details {
  readonly element: HTMLElement;
  private numbers: Record<"layer" | "expert" | "token", HTMLInputElement>;
  private tensor: HTMLInputElement;
  private name = h("span", { class: "value" });
  private nameRow: HTMLElement;
  private facts = h("div", { class: "facts", "aria-live": "off" });
  private totals = new Map<Dataset, Uint32Array>();

  constructor(private context: Context) {
    const integer = (key: "layer" | "expert" | "token") => {
      const input = h("input", { type: "number", min: 0, placeholder: "–", id: `selected-${key}`, onchange: () => context.select({ [key]: input.value === "" ? null : Number(input.value) }) });
      return input;
    };
    this.numbers = { layer: integer("layer"), expert: integer("expert"), token: integer("token") };
    const names = new Set(context.datasets.flatMap((d) => d.input.tensors.map((t) => t.name)));
    const list = h("datalist", { id: "tensor-names" }, ...[...names].map((n) => h("option", { value: n })));
    this.tensor = h("input", { type: "text", list: "tensor-names", placeholder: "–", id: "selected-tensor", onchange: () => {
      if (this.tensor.value === "" || names.has(this.tensor.value)) context.select({ tensor: this.tensor.value || null });
    } });
    const clear = (label: string, patch: Patch) => button("×", () => context.select(patch), { "aria-label": `Clear ${label}`, class: "clear" });
    const row = (text: string, control: HTMLElement, patch: Patch) => h("div", { class: "selection-row" }, field(text, control), clear(text, patch));
    this.nameRow = h("div", { class: "selection-row" }, h("span", { class: "field" }, h("span", {}, "result"), this.name), clear("result", { name: null }));
    this.element = h("aside", { class: "details scroll", "aria-label": "Selection", tabindex: "0" },
      h("div", { class: "details-head" }, h("h2", {}, "Selection"), button("Clear all", () => context.select(CLEAR), { title: "Escape" })),
      row("layer", this.numbers.layer, { layer: null }), row("expert", this.numbers.expert, { expert: null }),
      row("token", this.numbers.token, { token: null }), row("tensor", this.tensor, { tensor: null }), this.nameRow, list, this.facts);
  }

  update(s: Selection): void {
    for (const key of ["layer", "expert", "token"] as const) this.numbers[key].value = s[key] === null ? "" : String(s[key]);
    this.tensor.value = s.tensor ?? "";
    this.name.textContent = s.name ?? "";
    this.nameRow.hidden = s.name === null;
    const { datasets } = this.context;
    this.facts.replaceChildren();
    for (const data of datasets) {
      if (s.input !== null && s.input !== data.index) continue;
      const sections = [this.token(data, s), this.expert(data, s), this.layer(data, s), this.tensorFacts(data, s), this.record(data, s)].filter((x) => x !== null);
      if (sections.length === 0) continue;
      if (datasets.length > 1) this.facts.append(h("h3", {}, data.input.name));
      this.facts.append(...sections);
    }
  }

  private section(title: string, facts: Fact[]): HTMLElement {
    const list = h("dl");
    for (const [key, value] of facts) list.append(h("dt", {}, key), h("dd", {}, value));
    return h("section", {}, h("h4", {}, title), list);
  }

  private token(data: Dataset, { token, layer }: Selection): HTMLElement | null {
    const { tokens } = data.input;
    if (token === null || token >= tokens.text.length) return null;
    const facts: Fact[] = [["text", visible(tokens.text[token], tokens.position[token])], ["phase", tokens.phase[token] === 0 ? "prompt" : "generate"], ["sequence", String(tokens.sequence[token])], ["position", String(tokens.position[token])], ["start", time(tokens.start[token], data.input.time_unit)]];
    const r = layer === null ? -1 : routeOf(data, token, layer);
    if (r >= 0) facts.push([`experts in layer ${layer}`, data.routing!.experts.map((c) => c[r]).filter((e) => e >= 0).join(", ")]);
    return this.section(`Token ${token}`, facts);
  }

  private layer(data: Dataset, { layer }: Selection): HTMLElement | null {
    const l = data.input.layers.find((x) => x.index === layer);
    if (!l) return null;
    const size = data.input.tensors.reduce((sum, t) => sum + (t.layer === layer ? t.size : 0), 0);
    const facts: Fact[] = [["experts", count(l.n_expert)], ["experts per token", count(l.top_k)]];
    if (size) facts.push(["weights", bytes(size)]);
    if (data.routing && l.n_expert) {
      const counts = this.layerCounts(data, l.index);
      facts.push(["selections", count(counts.reduce((a, b) => a + b, 0))], ["experts never selected", count(counts.filter((c) => c === 0).length)]);
    }
    return this.section(`Layer ${layer}`, facts);
  }

  private expert(data: Dataset, { layer, expert }: Selection): HTMLElement | null {
    const l = data.input.layers.find((x) => x.index === layer);
    if (expert === null || !l || expert >= l.n_expert) return null;
    const facts: Fact[] = [];
    if (data.routing) {
      const counts = this.layerCounts(data, l.index);
      const total = counts.reduce((a, b) => a + b, 0);
      const rank = counts.filter((c) => c > counts[expert]).length + 1;
      facts.push(["selections", count(counts[expert])], ["share of the layer", total ? percent(counts[expert] / total) : "–"], ["rank", `${rank} of ${l.n_expert}`]);
      for (const [lane, n] of this.lanes(data, l.index, expert)) facts.push([lane, percent(n / counts[expert])]);
    }
    const size = data.input.tensors.reduce((sum, t) => sum + (t.layer === layer && t.n_expert > expert ? t.size / t.n_expert : 0), 0);
    if (size) facts.push(["size", bytes(Math.round(size))]);
    return this.section(`Expert ${expert} of layer ${layer}`, facts);
  }

  private tensorFacts(data: Dataset, { tensor }: Selection): HTMLElement | null {
    const t = data.tensor(tensor);
    if (!t) return null;
    const facts: Fact[] = [["category", t.category], ["type", t.type], ["file", data.input.files[t.file]?.name ?? "–"], ["offset", count(t.offset)], ["size", bytes(t.size)]];
    if (t.n_expert) facts.push(["experts", count(t.n_expert)], ["size of an expert", bytes(Math.round(t.size / t.n_expert))]);
    return this.section(t.name, facts);
  }

  private record(data: Dataset, { record }: Selection): HTMLElement | null {
    const { records: r, input } = data;
    if (!record || record[0] !== data.index || !r || record[1] >= r.rows) return null;
    const i = record[1];
    const facts: Fact[] = [["operation", input.ops[r.op[i]] ?? "–"], ["result", input.names[r.name[i]] ?? "–"], ["start", time(r.start[i], input.time_unit)]];
    if (r.duration[i] >= 0) facts.push(["duration", time(r.duration[i], "ns")]);
    if (r.bytes[i] >= 0) facts.push(["bytes read", bytes(r.bytes[i])]);
    if (r.duration[i] > 0 && r.bytes[i] > 0) facts.push(["rate", `${(r.bytes[i] / r.duration[i]).toFixed(1)} GB/s`]);
    if (r.thread) facts.push(["thread", String(r.thread[i])]);
    if (r.fallback?.[i] === 1) facts.push(["CPU fallback", "yes"]);
    return this.section(`Record ${count(i)}`, facts);
  }

  private layerCounts(data: Dataset, layer: number): Uint32Array {
    let counts = this.totals.get(data);
    if (!counts) this.totals.set(data, (counts = countExperts(data, null, null)));
    const row = data.layerRow.get(layer)!;
    return counts.subarray(row * data.maxExperts, row * data.maxExperts + data.input.layers[row].n_expert);
  }

  private lanes(data: Dataset, layer: number, expert: number): [string, number][] {
    const { routing, input } = data;
    const sums = new Map<string, number>();
    routing!.lanes.forEach((column, k) => {
      for (let i = 0; i < routing!.rows; i++) {
        if (routing!.layer[i] !== layer || routing!.experts[k][i] !== expert || column[i] < 0) continue;
        const lane = input.lanes[column[i]];
        sums.set(lane, (sums.get(lane) ?? 0) + 1);
      }
    });
    return [...sums];
  }
}
