/** Linear map of the model's files: a bar for each tensor and expert, by number of accesses. */
import { accessLayout, countAccesses, lowerBound, type Accesses } from "../analysis";
import { onDrag, Surface, tooltip } from "../canvas";
import type { Context, View } from "../context";
import type { Dataset } from "../dataset";
import { announce, button, field, h, select } from "../dom";
import { bytes, count, number, time } from "../format";
import { heatGradient } from "../palette";
import type { Selection } from "../selection";
import { drawFile, PLOT, type FileScene } from "./file-draw";

const MIN_ZOOM = 0.1;
const MAX_ZOOM = 500;

export function createFile(context: Context, data: Dataset): View {
  return new FileView(context, data);
}

class FileView implements View {
  readonly element: HTMLElement;
  private surface: Surface;
  private accesses: Accesses;
  /** First byte of each element on the axis of all files, and the tensor of the element. */
  private starts: Float64Array;
  private sizes: Float64Array;
  private tensorOf: Uint32Array;
  private total: number;
  private zoom = 1;
  private left = 0;
  private scope: "selection" | "all" = "selection";
  private key = "";
  private max = 0;
  private shown = "";
  private selection: Selection;
  private status = h("span", { class: "muted", role: "note" });
  private zoomText = h("output", { class: "zoom" }, "1 ×");
  private maxText = h("span");

  constructor(private context: Context, private data: Dataset) {
    this.selection = context.store.value;
    const { files, tensors } = data.input;
    this.accesses = accessLayout(data);
    const { begin, counts } = this.accesses;
    this.starts = new Float64Array(counts.length);
    this.sizes = new Float64Array(counts.length);
    this.tensorOf = new Uint32Array(counts.length);
    const base: number[] = [];
    this.total = files.reduce((sum, f, i) => ((base[i] = sum), sum + f.size), 0);
    tensors.forEach((t, i) => {
      const n = begin[i + 1] - begin[i];
      for (let e = 0; e < n; e++) {
        this.starts[begin[i] + e] = (base[t.file] ?? 0) + t.offset + (e * t.size) / n;
        this.sizes[begin[i] + e] = t.size / n;
        this.tensorOf[begin[i] + e] = i;
      }
    });
    this.surface = new Surface("file-map", {
      tabindex: "0", role: "application",
      "aria-label": `Map of the model file of ${data.input.name}. Plus and minus zoom, left and right arrows move, comma and period select the previous and next range.`,
    }, () => drawFile(this.surface, this.scene()));
    this.listen();
    const scope = select("Accesses", [["selection", "of the selection"], ["all", "all"]], "selection", (value) => {
      this.scope = value as typeof this.scope;
      this.update(this.selection);
    });
    this.element = h("div", { class: "view file" },
      h("div", { class: "toolbar" }, field("accesses", scope),
        h("span", { class: "group" }, button("−", () => this.zoomBy(1 / 2), { "aria-label": "Zoom out" }), this.zoomText,
          button("+", () => this.zoomBy(2), { "aria-label": "Zoom in" }), button("Fit", () => this.setView(1, 0)), button("To selection", () => this.toSelection())),
        this.status,
        h("span", { class: "legend" }, "height and color (log):", h("span", { class: "swatch cold" }), "0", h("span", { class: "gradient", style: `background:${heatGradient()}` }), this.maxText, h("span", { class: "swatch gap" }), "gap")),
      this.surface.element);
  }

  update(selection: Selection): void {
    this.selection = selection;
    const { data, accesses } = this;
    const { layer, token, time: range } = this.scope === "all" ? { layer: null, token: null, time: null } : selection;
    const key = JSON.stringify([layer, token, range, data.records !== null]);
    if (key !== this.key) {
      this.key = key;
      countAccesses(data, { layer, token, time: range }, accesses);
      this.summarize(layer, token, range);
    }
    const shown = `${selection.tensor} ${selection.layer} ${selection.expert}`;
    if (shown !== this.shown) {
      this.shown = shown;
      if (selection.tensor !== null && this.zoom > 1) this.reveal();
    }
    this.surface.redraw();
  }

  destroy(): void {
    this.surface.destroy();
  }

  private summarize(layer: number | null, token: number | null, range: [number, number] | null): void {
    const { counts } = this.accesses;
    this.max = 0;
    let touched = 0;
    let accessed = 0;
    counts.forEach((c, i) => {
      if (c > this.max) this.max = c;
      if (c === 0) return;
      touched++;
      accessed += this.sizes[i];
    });
    this.maxText.textContent = `${count(this.max)} accesses`;
    const parts = [layer === null ? null : `layer ${layer}`, token === null ? null : `token ${token}`, range ? range.map((t) => time(t, this.data.input.time_unit)).join(" to ") : null].filter(Boolean);
    this.status.textContent = !this.data.input.files.length ? "The file of the model is unknown."
      : this.data.records ? `${parts.join(", ") || "all accesses"}: ${bytes(Math.round(accessed))} of ${bytes(this.total)} read, ${count(touched)} of ${count(counts.length)} ranges` : "loading…";
  }

  private scene(): FileScene {
    const { zoom, left, total, starts, sizes, tensorOf, accesses, max, selection, data } = this;
    return { theme: this.context.theme(), tensors: data.input.tensors, begin: accesses.begin, counts: accesses.counts, starts, sizes, tensorOf, max, total, left, span: total / zoom, selection };
  }

  private listen(): void {
    const { canvas } = this.surface;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const [x] = this.surface.position(event);
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.setView(this.zoom, this.left + ((event.deltaX || event.deltaY) / this.surface.width) * (this.total / this.zoom));
      else this.zoomBy(Math.exp(-event.deltaY / 300), this.offsetAt(x));
    }, { passive: false });
    onDrag(canvas, {
      move: (dx, _dy, event) => {
        const [x, y] = this.surface.position(event);
        if (y < PLOT.overview) this.setView(this.zoom, (x / this.surface.width) * this.total - this.total / this.zoom / 2);
        else this.setView(this.zoom, this.left - (dx / this.surface.width) * (this.total / this.zoom));
      },
      click: (event) => {
        const [x, y] = this.surface.position(event);
        if (y < PLOT.overview) this.setView(this.zoom, (x / this.surface.width) * this.total - this.total / this.zoom / 2);
        else this.choose(this.elementAt(this.offsetAt(x)));
      },
    });
    canvas.addEventListener("mousemove", (event) => {
      const [x, y] = this.surface.position(event);
      tooltip(y < PLOT.overview ? "" : this.describe(this.elementAt(this.offsetAt(x)), this.offsetAt(x)), event);
    });
    canvas.addEventListener("mouseleave", () => tooltip(""));
    canvas.addEventListener("keydown", (event) => {
      const step = this.total / this.zoom / 10;
      const actions: Record<string, () => void> = {
        "+": () => this.zoomBy(2), "=": () => this.zoomBy(2), "-": () => this.zoomBy(1 / 2), "0": () => this.setView(1, 0),
        ArrowLeft: () => this.setView(this.zoom, this.left - step), ArrowRight: () => this.setView(this.zoom, this.left + step),
        ",": () => this.step(-1), ".": () => this.step(1),
      };
      const action = actions[event.key];
      if (!action || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      event.stopPropagation();
      action();
    });
  }

  private offsetAt(x: number): number {
    return this.left + (x / this.surface.width) * (this.total / this.zoom);
  }

  private setView(zoom: number, left: number): void {
    this.zoom = Math.max(MIN_ZOOM, Math.min(MAX_ZOOM, zoom));
    const span = this.total / this.zoom;
    // A file that is smaller than the window is centered.
    this.left = span >= this.total ? (this.total - span) / 2 : Math.max(0, Math.min(this.total - span, left));
    this.zoomText.textContent = `${number(this.zoom)} ×`;
    this.surface.redraw();
  }

  private zoomBy(factor: number, around = this.left + this.total / this.zoom / 2): void {
    const zoom = Math.max(MIN_ZOOM, Math.min(MAX_ZOOM, this.zoom * factor));
    this.setView(zoom, around - (around - this.left) * (this.zoom / zoom));
  }

  private elementAt(offset: number): number {
    const at = lowerBound(this.starts, offset + 1e-6) - 1;
    return at >= 0 && offset < this.starts[at] + this.sizes[at] ? at : -1;
  }

  private describe(at: number, offset: number): string {
    if (at < 0) return offset >= 0 && offset < this.total ? `no tensor at byte ${count(Math.floor(offset))}` : "";
    const t = this.data.input.tensors[this.tensorOf[at]];
    const expert = t.n_expert > 0 ? `, expert ${at - this.accesses.begin[this.tensorOf[at]]}` : "";
    return `${t.name}${expert}: ${count(this.accesses.counts[at])} accesses, ${bytes(Math.round(this.sizes[at]))} at byte ${count(Math.round(this.starts[at]))}`;
  }

  private choose(at: number): void {
    if (at < 0) return;
    const t = this.tensorOf[at];
    const tensor = this.data.input.tensors[t];
    this.context.select({ tensor: tensor.name, layer: tensor.layer >= 0 ? tensor.layer : null, expert: tensor.n_expert > 0 ? at - this.accesses.begin[t] : null, name: null });
    announce(this.describe(at, this.starts[at]));
  }

  /** Element of the selection: an expert of the selected tensor, or of the first expert tensor of its layer; -1 if none. */
  private selected(): number {
    const { tensor, layer, expert } = this.selection;
    const { tensors } = this.data.input;
    const t = tensor !== null ? this.data.tensorIndex.get(tensor) ?? -1 : layer === null ? -1 : tensors.findIndex((x) => x.layer === layer && (expert === null || x.n_expert > expert));
    if (t < 0) return -1;
    const e = expert !== null && expert < tensors[t].n_expert ? expert : 0;
    return this.accesses.begin[t] + e;
  }

  private step(direction: number): void {
    const at = this.selected();
    const next = at < 0 ? 0 : at + direction;
    if (next < 0 || next >= this.starts.length) return;
    this.choose(next);
  }

  private reveal(): void {
    const at = this.selected();
    const span = this.total / this.zoom;
    if (at < 0 || (this.starts[at] >= this.left && this.starts[at] + this.sizes[at] <= this.left + span)) return;
    this.setView(this.zoom, this.starts[at] + this.sizes[at] / 2 - span / 2);
  }

  private toSelection(): void {
    const at = this.selected();
    if (at < 0) return;
    const t = this.data.input.tensors[this.tensorOf[at]];
    const first = this.accesses.begin[this.tensorOf[at]];
    const span = this.selection.expert !== null && t.n_expert > 0 ? this.sizes[at] * 24 : t.size * 1.5;
    const zoom = Math.max(1, Math.min(MAX_ZOOM, this.total / span));
    const center = this.selection.expert !== null ? this.starts[at] + this.sizes[at] / 2 : this.starts[first] + t.size / 2;
    this.setView(zoom, center - this.total / zoom / 2);
  }
}
