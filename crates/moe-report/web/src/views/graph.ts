/** The computation graph of a pass. The layout is part of the report. */
import { onDrag, Surface, tooltip } from "../canvas";
import type { Context, View } from "../context";
import type { Graph, GraphNode } from "../data";
import type { Dataset } from "../dataset";
import { announce, button, checkbox, field, h, select } from "../dom";
import { NODE_CATEGORIES, nodeColor } from "../palette";
import type { Selection } from "../selection";
import { drawGraph, nodeState } from "./graph-draw";

export function createGraph(context: Context, data: Dataset): View {
  return new GraphView(context, data);
}

class GraphView implements View {
  readonly element: HTMLElement;
  private surface: Surface;
  private graph: Graph | null;
  private scale = 0;
  private x = 0;
  private y = 0;
  private hideOthers = false;
  private query = "";
  private found: number[] = [];
  private foundAt = -1;
  private selection: Selection;
  private shown = "";
  private current = -1;
  private status = h("span", { class: "muted", role: "note" });
  private layer: HTMLSelectElement;

  constructor(private context: Context, private data: Dataset) {
    this.selection = context.store.value;
    const { graphs, layers } = data.input;
    this.graph = graphs[graphs.length - 1] ?? null;
    this.surface = new Surface("graph-map", {
      tabindex: "0", role: "application",
      "aria-label": `Computation graph of ${data.input.name}. Arrow keys follow the edges to sources and readers, plus and minus zoom.`,
    }, () => this.draw());
    this.listen();
    const phase = select("Pass", graphs.map((g, i): [string, string] => [String(i), g.phase]), String(graphs.length - 1), (i) => {
      this.graph = graphs[Number(i)];
      this.search();
      this.fit();
    });
    this.layer = select("Layer", [["", "all"], ...layers.map((l): [string, string] => [String(l.index), String(l.index)])], "", (value) => {
      context.select({ layer: value === "" ? null : Number(value) });
      this.shown = "";
    });
    const input = h("input", { type: "search", class: "search", placeholder: "name or operation", oninput: () => {
      this.query = input.value.toLowerCase();
      this.search();
    }, onkeydown: (event: KeyboardEvent) => {
      if (event.key === "Enter") this.nextFound(event.shiftKey ? -1 : 1);
    } });
    this.element = h("div", { class: "view graph" },
      h("div", { class: "toolbar" },
        field("pass", phase), field("layer", this.layer), checkbox("Hide other layers", false, (on) => {
          this.hideOthers = on;
          this.surface.redraw();
        }),
        field("search", input),
        h("span", { class: "group" }, button("−", () => this.zoomBy(1 / 1.5), { "aria-label": "Zoom out" }), button("+", () => this.zoomBy(1.5), { "aria-label": "Zoom in" }), button("Fit", () => this.fit())),
        this.status,
        h("span", { class: "legend" }, ...NODE_CATEGORIES.flatMap((c) => [h("span", { class: "swatch", style: `background:${nodeColor(c)}` }), c]))),
      this.surface.element);
    this.search();
  }

  update(selection: Selection): void {
    this.selection = selection;
    this.layer.value = selection.layer === null ? "" : String(selection.layer);
    const shown = JSON.stringify([selection.layer, selection.tensor, selection.name]);
    if (shown !== this.shown) {
      this.shown = shown;
      this.reveal();
    }
    this.surface.redraw();
  }

  destroy(): void {
    this.surface.destroy();
  }

  private draw(): void {
    if (!this.graph) {
      this.surface.context.fillStyle = this.context.theme().muted;
      this.surface.context.font = "13px system-ui, sans-serif";
      this.surface.context.fillText("The input contains no computation graph.", 12, 24);
      return;
    }
    if (this.scale === 0) {
      this.fit();
      this.reveal();
    }
    drawGraph(this.surface, {
      graph: this.graph, theme: this.context.theme(), tensors: this.data.input.tensors, scale: this.scale, x: this.x, y: this.y,
      selection: this.selection, hideOthers: this.hideOthers, found: this.query ? new Set(this.found) : null, current: this.current,
    });
  }

  private listen(): void {
    const { canvas } = this.surface;
    onDrag(canvas, {
      move: (dx, dy) => {
        this.x -= dx / this.scale;
        this.y -= dy / this.scale;
        this.surface.redraw();
      },
      click: (event) => {
        const at = this.nodeAt(event);
        if (at >= 0) this.choose(at);
      },
    });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoomBy(Math.exp(-event.deltaY / 400), this.surface.position(event));
    }, { passive: false });
    canvas.addEventListener("mousemove", (event) => {
      const at = this.nodeAt(event);
      tooltip(at < 0 ? "" : this.describe(this.graph!.nodes[at]), event);
    });
    canvas.addEventListener("mouseleave", () => tooltip(""));
    canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  private onKey(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || !this.graph) return;
    const actions: Record<string, () => void> = {
      "+": () => this.zoomBy(1.5), "=": () => this.zoomBy(1.5), "-": () => this.zoomBy(1 / 1.5), "0": () => this.fit(),
      ArrowDown: () => this.follow(0), ArrowUp: () => this.follow(1), ArrowRight: () => this.sibling(1), ArrowLeft: () => this.sibling(-1),
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    event.stopPropagation();
    action();
  }

  /** Goes along an edge: 0 to a reader, 1 to a source that is an operation, if possible. */
  private follow(end: 0 | 1): void {
    const { nodes, edges } = this.graph!;
    if (this.current < 0) return this.choose(0);
    const targets = edges.filter((e) => e[end] === this.current).map((e) => e[1 - end]);
    const next = targets.find((t) => nodes[t].op !== "CONST") ?? targets[0];
    if (next !== undefined) this.choose(next);
  }

  /** Goes to the next node of the same row. */
  private sibling(direction: number): void {
    const { nodes } = this.graph!;
    if (this.current < 0) return this.choose(0);
    const { x, y } = nodes[this.current];
    const row = nodes.map((_, i) => i).filter((i) => Math.abs(nodes[i].y - y) < 60 && (nodes[i].x - x) * direction > 0);
    row.sort((a, b) => Math.abs(nodes[a].x - x) - Math.abs(nodes[b].x - x));
    if (row.length) this.choose(row[0]);
  }

  private describe(node: GraphNode): string {
    const parts = [node.label, node.op, `${node.dtype} [${node.shape.join(", ")}]`];
    if (node.layer >= 0) parts.push(`layer ${node.layer}`);
    return parts.join(" · ");
  }

  private choose(at: number): void {
    const node = this.graph!.nodes[at];
    this.current = at;
    const leaf = node.op === "CONST";
    const layer = node.layer < 0 ? null : node.layer;
    this.shown = "";
    const keep = layer === this.selection.layer ? this.selection.expert : null;
    this.context.select({ layer, expert: keep, tensor: this.data.input.tensors[node.tensor]?.name ?? null, name: leaf ? null : node.label });
    announce(this.describe(node));
  }

  private nodeAt(event: MouseEvent): number {
    if (!this.graph) return -1;
    const [px, py] = this.surface.position(event);
    const gx = this.x + px / this.scale;
    const gy = this.y + py / this.scale;
    return this.graph.nodes.findIndex((n) => Math.abs(gx - n.x) <= n.w / 2 && Math.abs(gy - n.y) <= n.h / 2 && !(this.hideOthers && nodeState(n, this.selection) === "other"));
  }

  private zoomBy(factor: number, around: [number, number] = [this.surface.width / 2, this.surface.height / 2]): void {
    const next = Math.max(0.01, Math.min(3, this.scale * factor));
    this.x += around[0] / this.scale - around[0] / next;
    this.y += around[1] / this.scale - around[1] / next;
    this.scale = next;
    this.surface.redraw();
  }

  private fit(): void {
    if (!this.graph || !this.surface.width) return;
    const { width, height } = this.graph;
    this.show(0, 0, width, height, 0.01);
  }

  /** Shows a rectangle of the graph; `least` is the smallest scale. */
  private show(left: number, top: number, width: number, height: number, least: number): void {
    const { surface } = this;
    this.scale = Math.max(least, Math.min(1, surface.width / width, surface.height / height));
    this.x = left + width / 2 - surface.width / this.scale / 2;
    this.y = top + height / 2 - surface.height / this.scale / 2;
    this.surface.redraw();
  }

  /** Shows the nodes of the selection, if they are not visible or too small to read. */
  private reveal(): void {
    const { graph, selection, surface } = this;
    if (!graph || this.scale === 0) return;
    const nodes = graph.nodes;
    const named = nodes.findIndex((n) => (selection.name !== null ? n.label === selection.name : n.op === "CONST" && selection.tensor !== null && this.data.input.tensors[n.tensor]?.name === selection.tensor));
    if (named >= 0) this.current = named;
    else if (this.current >= 0 && nodes[this.current].layer !== selection.layer) this.current = -1;
    const part = named >= 0 ? [nodes[named]] : selection.layer === null ? [] : nodes.filter((n) => n.layer === selection.layer);
    if (part.length === 0) return;
    const left = Math.min(...part.map((n) => n.x - n.w / 2)) - 30;
    const right = Math.max(...part.map((n) => n.x + n.w / 2)) + 30;
    const top = Math.min(...part.map((n) => n.y - n.h / 2)) - 30;
    const bottom = Math.max(...part.map((n) => n.y + n.h / 2)) + 30;
    const visible = left >= this.x && right <= this.x + surface.width / this.scale && top >= this.y && bottom <= this.y + surface.height / this.scale;
    if (named >= 0 && visible && this.scale > 0.4) return;
    if (named >= 0) this.show(left - 400, top - 250, right - left + 800, bottom - top + 500, 0.45);
    else {
      this.show(left, top, right - left, bottom - top, 0.6);
      // A layer that does not fit is shown from its start.
      if ((bottom - top) * this.scale > surface.height) this.y = top;
    }
  }

  private search(): void {
    const nodes = this.graph?.nodes ?? [];
    this.found = this.query ? nodes.flatMap((n, i) => (n.label.toLowerCase().includes(this.query) || n.op.toLowerCase().includes(this.query) ? [i] : [])) : [];
    this.foundAt = -1;
    this.status.textContent = this.query ? `${this.found.length} nodes found (Enter: next)` : `${nodes.length} nodes, ${this.graph?.edges.length ?? 0} edges`;
    this.surface.redraw();
  }

  private nextFound(direction: number): void {
    if (this.found.length === 0) return;
    this.foundAt = (this.foundAt + direction + this.found.length) % this.found.length;
    this.choose(this.found[this.foundAt]);
    this.status.textContent = `node ${this.foundAt + 1} of ${this.found.length}`;
  }
}
