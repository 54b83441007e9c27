/** Layers × experts: how often each expert is selected in the time range, as a heat map. */
import { countExperts } from "../analysis";
import { onDrag, Surface, tooltip } from "../canvas";
import type { Context, View } from "../context";
import type { Dataset } from "../dataset";
import { announce, field, h, select } from "../dom";
import { count, percent, time } from "../format";
import { heatBytes, heatGradient } from "../palette";
import type { Selection } from "../selection";
import { LayerTime } from "./layer-time";

const LEFT = 44;
const TOP = 20;

export function createExperts(context: Context, data: Dataset): View {
  return new ExpertsView(context, data);
}

class ExpertsView implements View {
  readonly element: HTMLElement;
  private surface: Surface;
  private history: LayerTime | null = null;
  private counts: Uint32Array;
  private key = "";
  private selection: Selection;
  private byRank = false;
  /** Expert at each column of each layer: `layerRow * maxExperts + column`. */
  private order: Uint32Array;
  private texture = document.createElement("canvas");
  private status = h("span", { class: "muted", role: "note" });
  private max = h("span");
  private rows: number[];

  constructor(private context: Context, private data: Dataset) {
    this.selection = context.store.value;
    this.counts = countExperts(data, null, null);
    this.rows = data.input.layers.filter((l) => l.n_expert > 0).map((l) => data.layerRow.get(l.index)!);
    this.order = new Uint32Array(this.counts.length).map((_, i) => i % Math.max(1, data.maxExperts));
    this.surface = new Surface("matrix", {
      tabindex: "0", role: "application",
      "aria-label": `Selections by layer and expert of ${data.input.name}. Arrow keys select a layer and an expert.`,
    }, () => this.draw());
    const { canvas } = this.surface;
    onDrag(canvas, { move: () => {}, click: (event) => this.pick(event) });
    canvas.addEventListener("mousemove", (event) => this.hover(event));
    canvas.addEventListener("mouseleave", () => tooltip(""));
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    if (!data.selections) this.history = new LayerTime(context, data);
    const order = select("Order of the columns", [["id", "expert id"], ["rank", "most selected first"]], "id", (value) => {
      this.byRank = value === "rank";
      this.key = "";
      this.update(this.selection);
    });
    this.element = h("div", { class: "view experts" },
      h("div", { class: "toolbar" }, field("columns", order), this.status,
        h("span", { class: "legend" }, "0", h("span", { class: "gradient", style: `background:${heatGradient()}` }), this.max)),
      this.surface.element, this.history?.element);
  }

  update(selection: Selection): void {
    this.selection = selection;
    const { data } = this;
    const token = selection.token !== null && selection.time === null ? selection.token : null;
    const key = `${token} ${selection.time} ${data.version} ${this.byRank}`;
    if (key !== this.key) {
      this.key = key;
      countExperts(data, token, selection.time, this.counts);
      if (this.byRank) this.rank();
      this.paint();
      const scope = token !== null ? `token ${token}` : selection.time ? selection.time.map((t) => time(t, data.input.time_unit)).join(" to ") : "all tokens";
      const total = this.counts.reduce((sum, n) => sum + n, 0);
      this.status.textContent = data.routing || data.selections ? `${scope}: ${count(total)} selections` : data.loaded ? "The input contains no tokens with their experts." : "loading…";
    }
    this.surface.redraw();
    this.history?.update(selection);
  }

  destroy(): void {
    this.surface.destroy();
    this.history?.destroy();
  }

  private rank(): void {
    const all = countExperts(this.data, null, null);
    const n = this.data.maxExperts;
    for (let row = 0; row < this.data.layerRow.size; row++) {
      const ids = Array.from({ length: n }, (_, i) => i).sort((a, b) => all[row * n + b] - all[row * n + a]);
      this.order.set(ids, row * n);
    }
  }

  /** Draws one pixel for each expert of each layer. */
  private paint(): void {
    const { texture, counts, rows, data } = this;
    const n = data.maxExperts;
    if (n === 0 || rows.length === 0) return;
    if (!this.byRank) this.order = this.order.map((_, i) => i % n);
    let max = 0;
    for (const c of counts) if (c > max) max = c;
    this.max.textContent = `${count(max)} selections`;
    texture.width = n;
    texture.height = rows.length;
    const context = texture.getContext("2d")!;
    const image = context.createImageData(n, rows.length);
    rows.forEach((row, y) => {
      const width = data.input.layers[row].n_expert;
      for (let x = 0; x < width; x++) {
        const c = counts[row * n + this.order[row * n + x]];
        if (c === 0) continue;
        const at = 4 * (y * n + x);
        image.data.set(heatBytes(Math.sqrt(c / max)), at);
        image.data[at + 3] = 255;
      }
    });
    context.putImageData(image, 0, 0);
  }

  private geometry(): { w: number; h: number } {
    const { width, height } = this.surface;
    return { w: (width - LEFT - 8) / Math.max(1, this.data.maxExperts), h: Math.min(56, (height - TOP - 6) / Math.max(1, this.rows.length)) };
  }

  private draw(): void {
    const { surface, data, rows, selection } = this;
    const { context: c } = surface;
    const theme = this.context.theme();
    const n = data.maxExperts;
    const { w, h: rowHeight } = this.geometry();
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    if (n === 0) {
      c.fillStyle = theme.muted;
      c.fillText("The input has no layer with experts.", 12, 24);
      return;
    }
    const bottom = TOP + rows.length * rowHeight;
    rows.forEach((row, y) => {
      c.fillStyle = theme.empty;
      c.fillRect(LEFT, TOP + y * rowHeight, w * data.input.layers[row].n_expert, rowHeight);
    });
    c.imageSmoothingEnabled = false;
    if (this.texture.width) c.drawImage(this.texture, LEFT, TOP, w * n, rows.length * rowHeight);
    c.fillStyle = theme.surface;
    if (w >= 5) for (let x = 1; x < n; x++) c.fillRect(LEFT + x * w - 0.5, TOP, 1, bottom - TOP);
    if (rowHeight >= 5) for (let y = 1; y < rows.length; y++) c.fillRect(LEFT, TOP + y * rowHeight - 0.5, w * n, 1);
    c.fillStyle = theme.muted;
    c.textAlign = "right";
    const everyRow = Math.ceil(12 / rowHeight);
    rows.forEach((row, y) => {
      const layer = data.input.layers[row].index;
      c.fillStyle = layer === selection.layer ? theme.text : theme.muted;
      if (y % everyRow === 0 || layer === selection.layer) c.fillText(String(layer), LEFT - 6, TOP + (y + 0.5) * rowHeight);
    });
    c.textAlign = "center";
    c.fillStyle = theme.muted;
    const everyColumn = [1, 2, 4, 8, 16, 32, 64, 128].find((s) => s * w > 26) ?? 256;
    for (let x = 0; x < n; x += everyColumn) c.fillText(String(this.byRank ? x + 1 : x), LEFT + (x + 0.5) * w, TOP - 9);
    c.textAlign = "left";
    c.fillText("layer", 4, TOP - 9);
    this.drawSelection(w, rowHeight, theme.mark);
  }

  private drawSelection(w: number, rowHeight: number, color: string): void {
    const { selection, surface, rows, data } = this;
    const y = rows.findIndex((row) => data.input.layers[row].index === selection.layer);
    if (y < 0) return;
    const { context: c } = surface;
    c.strokeStyle = color;
    c.lineWidth = 1.5;
    c.strokeRect(LEFT - 1, TOP + y * rowHeight - 0.5, w * data.input.layers[rows[y]].n_expert + 2, rowHeight + 1);
    if (selection.expert === null) return;
    const x = this.column(rows[y], selection.expert);
    if (x < 0) return;
    c.lineWidth = 2.5;
    c.strokeRect(LEFT + x * w - 2, TOP + y * rowHeight - 2, w + 4, rowHeight + 4);
  }

  private column(row: number, expert: number): number {
    const n = this.data.maxExperts;
    return this.order.subarray(row * n, row * n + n).indexOf(expert);
  }

  /** Layer row and expert at a position, or null. */
  private at(event: MouseEvent): { row: number; expert: number } | null {
    const [px, py] = this.surface.position(event);
    const { w, h: rowHeight } = this.geometry();
    const x = Math.floor((px - LEFT) / w);
    const row = this.rows[Math.floor((py - TOP) / rowHeight)];
    if (row === undefined || px < LEFT || py < TOP || x >= this.data.input.layers[row].n_expert) return null;
    return { row, expert: this.order[row * this.data.maxExperts + x] };
  }

  private describe(row: number, expert: number): string {
    const n = this.data.maxExperts;
    const total = this.counts.subarray(row * n, row * n + n).reduce((sum, c) => sum + c, 0);
    const c = this.counts[row * n + expert];
    return `layer ${this.data.input.layers[row].index}, expert ${expert}: ${count(c)} selections${total ? `, ${percent(c / total)} of the layer` : ""}`;
  }

  private hover(event: MouseEvent): void {
    const hit = this.at(event);
    tooltip(hit ? this.describe(hit.row, hit.expert) : "", event);
  }

  private pick(event: MouseEvent): void {
    const hit = this.at(event);
    if (hit) this.choose(hit.row, hit.expert);
  }

  private choose(row: number, expert: number): void {
    this.context.select({ layer: this.data.input.layers[row].index, expert });
    announce(this.describe(row, expert));
  }

  private onKey(event: KeyboardEvent): void {
    const step: Record<string, [number, number]> = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const move = step[event.key];
    if (!move || this.rows.length === 0) return;
    event.preventDefault();
    const { selection, rows, data } = this;
    const y = rows.findIndex((row) => data.input.layers[row].index === selection.layer);
    const nextY = Math.max(0, Math.min(rows.length - 1, y < 0 ? 0 : y + move[1]));
    const x = y < 0 || selection.expert === null ? -1 : this.column(rows[y], selection.expert);
    const nextX = Math.max(0, Math.min(data.input.layers[rows[nextY]].n_expert - 1, x < 0 ? 0 : x + move[0]));
    this.choose(rows[nextY], this.order[rows[nextY] * data.maxExperts + nextX]);
  }
}
