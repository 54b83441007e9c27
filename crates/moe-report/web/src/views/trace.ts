/** The trace as a table: a row for each record, with sorting and filters. */
import type { Context, View } from "../context";
import type { Dataset } from "../dataset";
import { announce, checkbox, field, h, select } from "../dom";
import { bytes, count, time, visible } from "../format";
import { laneColor } from "../palette";
import { filterRows, matcher, sortRows, type SortKey } from "../rows";
import { CLEAR, type Patch, type Selection } from "../selection";
import { VirtualList } from "../virtual-list";

const ROW_HEIGHT = 24;

const COLUMNS: { key: SortKey; title: string; number?: boolean }[] = [
  { key: "index", title: "record", number: true },
  { key: "start", title: "start", number: true },
  { key: "duration", title: "duration", number: true },
  { key: "token", title: "token" },
  { key: "layer", title: "layer", number: true },
  { key: "op", title: "operation" },
  { key: "name", title: "result" },
  { key: "tensor", title: "tensor" },
  { key: "experts", title: "experts" },
  { key: "bytes", title: "bytes read", number: true },
];

export function createTrace(context: Context, data: Dataset): View {
  return new TraceView(context, data);
}

class TraceView implements View {
  readonly element: HTMLElement;
  private list: VirtualList;
  private grid: HTMLElement;
  private headers: HTMLElement[] = [];
  private rows: Uint32Array = new Uint32Array(0);
  private sort: { key: SortKey; descending: boolean } = { key: "index", descending: false };
  private text = "";
  private key = "";
  private matchKey = "";
  private match: ((row: number) => boolean) | null = null;
  private selection: Selection;
  private active = -1;
  private own = false;
  private counted = { key: "", n: 0 };
  private status = h("span", { class: "muted", role: "note" });
  private onlySelection: ReturnType<typeof checkbox>;
  private controls: Record<"layer" | "expert" | "token" | "op", HTMLInputElement | HTMLSelectElement>;

  constructor(private context: Context, private data: Dataset) {
    this.selection = context.store.value;
    const header = h("div", { role: "row", class: "row header" });
    for (const column of COLUMNS) {
      const cell = h("div", { role: "columnheader", class: `cell c-${column.key}`, "aria-sort": "none" },
        h("button", { type: "button", onclick: () => this.sortBy(column.key) }, column.title));
      this.headers.push(cell);
      header.append(cell);
    }
    this.list = new VirtualList({
      role: "grid", tabindex: "0", "aria-label": `Records of ${data.input.name}`, "aria-colcount": COLUMNS.length, "aria-readonly": "true",
      onkeydown: (event: KeyboardEvent) => this.onKey(event),
    }, h("div", { role: "rowgroup", class: "head" }, header), ROW_HEIGHT, () => this.makeRow(), (element, i) => this.fill(element, i));
    this.grid = this.list.element;
    this.list.element.addEventListener("click", (event) => this.click(event));
    const integer = (key: "layer" | "expert" | "token") => {
      const input = h("input", { type: "number", min: 0, placeholder: "all", onchange: () => this.pick({ [key]: input.value === "" ? null : Number(input.value) }) });
      return input;
    };
    this.controls = {
      layer: integer("layer"), expert: integer("expert"), token: integer("token"),
      op: select("Operation", [["", "all"], ...[...data.input.ops].sort().map((op): [string, string] => [op, op])], "", (op) => context.select({ op: op || null })),
    };
    const search = h("input", { type: "search", class: "search", placeholder: "result or tensor", oninput: () => {
      this.text = search.value;
      this.update(this.selection);
    } });
    this.onlySelection = checkbox("Only the selection", false, (filter) => context.select({ filter }));
    this.element = h("div", { class: "view trace" },
      h("div", { class: "toolbar" },
        field("layer", this.controls.layer), field("operation", this.controls.op), field("expert", this.controls.expert), field("token", this.controls.token),
        field("search", search), this.onlySelection, this.status),
      this.grid);
  }

  /** A filter of the toolbar is a part of the selection. */
  private pick(patch: Patch): void {
    this.context.select({ ...patch, filter: true });
  }

  update(selection: Selection): void {
    this.selection = selection;
    const { data, controls } = this;
    for (const key of ["layer", "expert", "token"] as const) controls[key].value = selection[key] === null ? "" : String(selection[key]);
    controls.op.value = selection.op ?? "";
    this.onlySelection.input.checked = selection.filter;
    if (!data.records) {
      this.status.textContent = data.loaded ? "The input contains no records." : "loading…";
      return;
    }
    const { layer, expert, token, tensor, name, time: range } = selection;
    const matchKey = JSON.stringify([layer, expert, token, tensor, name, range, data.routing !== null]);
    const key = JSON.stringify([this.text, selection.op, selection.filter && matchKey, this.sort]);
    if (key !== this.key) {
      this.key = key;
      this.rows = sortRows(data, filterRows(data, { op: selection.op, text: this.text, selection: selection.filter ? selection : null }), this.sort.key, this.sort.descending);
      this.active = -1;
      this.grid.setAttribute("aria-rowcount", String(this.rows.length + 1));
      this.list.setRows(this.rows.length);
    }
    if (matchKey !== this.matchKey) {
      this.matchKey = matchKey;
      this.match = selection.filter ? null : matcher(data, selection);
      if (!this.own) this.revealMatch();
    }
    this.own = false;
    this.status.textContent = `${count(this.rows.length)} of ${count(data.records.rows)} records${this.match ? `, ${count(this.matches())} highlighted` : ""}`;
    if (selection.record?.[0] === data.index && this.rows[this.active] !== selection.record[1]) {
      this.active = this.rows.indexOf(selection.record[1]);
      if (this.active >= 0) this.list.reveal(this.active, true);
    } else if (selection.record === null) this.active = -1;
    this.list.redraw();
  }

  private isMatch(row: number): boolean {
    const { time: range } = this.selection;
    const { start } = this.data.records!;
    return this.match !== null && (!range || (start[row] >= range[0] && start[row] < range[1])) && this.match(row);
  }

  /** Number of highlighted rows. */
  private matches(): number {
    const key = `${this.key} ${this.matchKey}`;
    if (this.counted.key !== key) this.counted = { key, n: this.rows.reduce((n, row) => n + Number(this.isMatch(row)), 0) };
    return this.counted.n;
  }

  /** Scrolls to the first highlighted row. */
  private revealMatch(): void {
    if (!this.match) return;
    const at = this.rows.findIndex((row) => this.isMatch(row));
    if (at >= 0) this.list.reveal(at, true);
  }

  private sortBy(key: SortKey): void {
    this.sort = { key, descending: this.sort.key === key && !this.sort.descending };
    COLUMNS.forEach((column, i) => this.headers[i].setAttribute("aria-sort", column.key !== key ? "none" : this.sort.descending ? "descending" : "ascending"));
    this.update(this.selection);
    announce(`sorted by ${key}, ${this.sort.descending ? "descending" : "ascending"}`);
  }

  private makeRow(): HTMLElement {
    const row = h("div", { role: "row", class: "row" });
    for (const column of COLUMNS) row.append(h("div", { role: "gridcell", class: `cell c-${column.key}` }));
    return row;
  }

  private fill(element: HTMLElement, at: number): void {
    const { data, rows } = this;
    const { input, records: r, routing } = data;
    if (!r) return;
    const i = rows[at];
    const cells = element.children;
    const unit = input.time_unit;
    const token = r.token[i];
    const texts = [
      count(i), time(r.start[i], unit), r.duration[i] < 0 ? "" : time(r.duration[i], "ns"),
      token < 0 ? "" : `${token} ${visible(input.tokens.text[token], input.tokens.position[token])}`,
      r.layer[i] < 0 ? "" : String(r.layer[i]), input.ops[r.op[i]] ?? "", input.names[r.name[i]] ?? "", input.tensors[r.tensor[i]]?.name ?? "",
      null, r.bytes[i] <= 0 ? "" : bytes(r.bytes[i]),
    ];
    texts.forEach((text, c) => {
      if (text !== null && cells[c].textContent !== text) cells[c].textContent = text;
    });
    this.fillExperts(cells[8] as HTMLElement, routing ? r.route[i] : -1);
    element.classList.toggle("match", !this.selection.filter && this.isMatch(i));
    element.classList.toggle("odd", at % 2 === 1);
    element.setAttribute("aria-selected", String(at === this.active));
    element.setAttribute("aria-rowindex", String(at + 2));
    element.id = `r${data.index}-${at}`;
    element.dataset.at = String(at);
  }

  private fillExperts(cell: HTMLElement, route: number): void {
    const { routing, input } = this.data;
    const key = `${route} ${this.selection.expert} ${routing !== null}`;
    if (cell.dataset.key === key) return;
    cell.dataset.key = key;
    cell.textContent = "";
    if (route < 0 || !routing) return;
    routing.experts.forEach((column, k) => {
      const e = column[route];
      if (e < 0) return;
      const lane = input.lanes[routing.lanes[k]?.[route] ?? -1];
      cell.append(h("span", {
        class: e === this.selection.expert ? "chip selected" : "chip", title: lane ? `expert ${e}, ${lane}` : `expert ${e}`, style: lane ? `--lane:${laneColor(lane)}` : null,
      }, String(e)));
    });
  }

  private click(event: MouseEvent): void {
    const row = (event.target as HTMLElement).closest<HTMLElement>(".row[data-at]");
    if (row) this.choose(Number(row.dataset.at));
  }

  private choose(at: number): void {
    const { input, records: r } = this.data;
    if (!r || at < 0 || at >= this.rows.length) return;
    const i = this.rows[at];
    this.active = at;
    this.list.reveal(at);
    this.grid.setAttribute("aria-activedescendant", `r${this.data.index}-${at}`);
    const record: Patch = { record: [this.data.index, i] };
    if (!this.selection.filter) {
      const time = this.selection.time;
      const layer = r.layer[i] < 0 ? null : r.layer[i];
      const { expert } = this.selection;
      const keep = expert !== null && layer === this.selection.layer && r.route[i] >= 0 && this.data.routing!.experts.some((c) => c[r.route[i]] === expert);
      Object.assign(record, CLEAR, { time, op: this.selection.op, record: record.record, layer, expert: keep ? expert : null, token: r.token[i] < 0 ? null : r.token[i], tensor: input.tensors[r.tensor[i]]?.name ?? null, name: input.names[r.name[i]] ?? null });
      this.own = true;
    }
    this.context.select(record);
  }

  private onKey(event: KeyboardEvent): void {
    if ((event.target as HTMLElement).closest("button")) return;
    const last = this.rows.length - 1;
    const at = this.active;
    const { page } = this.list;
    const next: Record<string, number> = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: last };
    if (!(event.key in next)) return;
    event.preventDefault();
    this.choose(Math.max(0, Math.min(last, next[event.key])));
  }
}
