/** Draws the nodes and edges of a computation graph. */
import type { Surface } from "../canvas";
import type { Graph, GraphNode, Tensor } from "../data";
import { nodeColor, type Theme } from "../palette";
import type { Selection } from "../selection";

export interface GraphScene {
  graph: Graph;
  theme: Theme;
  tensors: Tensor[];
  scale: number;
  x: number;
  y: number;
  selection: Selection;
  hideOthers: boolean;
  /** Nodes that the search found; null without a search. */
  found: Set<number> | null;
  /** Node with the keyboard focus; -1 for none. */
  current: number;
}

/** `other` if a layer is selected and the node belongs to another one. */
export function nodeState(node: GraphNode, selection: Selection): "normal" | "other" {
  return selection.layer !== null && node.layer !== selection.layer ? "other" : "normal";
}

export function drawGraph(surface: Surface, scene: GraphScene): void {
  const { context: c, width, height } = surface;
  const { graph, scale, selection, hideOthers, found } = scene;
  const { nodes } = graph;
  c.save();
  c.scale(scale, scale);
  c.translate(-scene.x, -scene.y);
  const left = scene.x;
  const top = scene.y;
  const right = left + width / scale;
  const bottom = top + height / scale;
  const dim = nodes.map((n) => nodeState(n, selection) === "other");
  drawEdges(c, scene, dim, [left, top, right, bottom]);
  nodes.forEach((n, i) => {
    if (n.x + n.w / 2 < left || n.x - n.w / 2 > right || n.y + n.h / 2 < top || n.y - n.h / 2 > bottom) return;
    if (dim[i] && hideOthers) return;
    const hit = found?.has(i) ?? false;
    c.globalAlpha = (dim[i] || (found && !hit)) && !hit ? 0.3 : 1;
    drawNode(c, n, scene, hit, i === scene.current);
  });
  c.restore();
}

function drawEdges(c: CanvasRenderingContext2D, scene: GraphScene, dim: boolean[], [left, top, right, bottom]: number[]): void {
  const { graph, theme, scale, hideOthers, current } = scene;
  const { nodes, edges } = graph;
  const draw = (chosen: (source: number, target: number) => boolean) => {
    c.beginPath();
    for (const [s, t] of edges) {
      if (!chosen(s, t)) continue;
      const a = nodes[s];
      const b = nodes[t];
      if (Math.max(a.y, b.y) < top || Math.min(a.y, b.y) > bottom || Math.max(a.x, b.x) < left || Math.min(a.x, b.x) > right) continue;
      const y0 = a.y + a.h / 2;
      const y1 = b.y - b.h / 2;
      const bend = Math.min(60, Math.abs(y1 - y0) / 2 + 10);
      c.moveTo(a.x, y0);
      c.bezierCurveTo(a.x, y0 + bend, b.x, y1 - bend, b.x, y1);
    }
    c.stroke();
  };
  c.lineWidth = Math.max(1, 0.7 / scale);
  c.strokeStyle = theme.muted;
  if (!hideOthers) {
    c.globalAlpha = 0.15;
    draw((s, t) => dim[s] || dim[t]);
  }
  c.globalAlpha = 0.7;
  draw((s, t) => !dim[s] && !dim[t]);
  if (current < 0) return;
  c.globalAlpha = 1;
  c.strokeStyle = theme.mark;
  c.lineWidth = Math.max(2, 1.2 / scale);
  draw((s, t) => s === current || t === current);
}

function drawNode(c: CanvasRenderingContext2D, n: GraphNode, scene: GraphScene, hit: boolean, current: boolean): void {
  const { theme, scale, selection, tensors } = scene;
  const x = n.x - n.w / 2;
  const y = n.y - n.h / 2;
  const leaf = n.op === "CONST";
  const selected = (selection.name !== null && n.label === selection.name) || (leaf && selection.tensor !== null && tensors[n.tensor]?.name === selection.tensor);
  if (scale < 0.25) {
    c.fillStyle = nodeColor(n.category);
    c.fillRect(x, y, n.w, n.h);
  } else {
    c.fillStyle = theme.surface;
    c.strokeStyle = nodeColor(n.category);
    c.lineWidth = 1.5;
    c.beginPath();
    c.roundRect(x, y, n.w, n.h, leaf ? n.h / 2 : 4);
    c.fill();
    c.stroke();
    if (!leaf) {
      c.fillStyle = nodeColor(n.category);
      c.fillRect(x, y + 3, 5, n.h - 6);
    }
    c.textAlign = "center";
    c.textBaseline = "middle";
    c.fillStyle = theme.text;
    const label = leaf ? n.label.replace(/^blk\.\d+\./, "") : n.label;
    c.font = "600 12px system-ui, sans-serif";
    c.fillText(label, n.x + (leaf ? 0 : 2), n.y - 7, n.w - 18);
    c.fillStyle = theme.muted;
    c.font = "10px system-ui, sans-serif";
    c.fillText(leaf ? `${n.dtype} ${n.shape.join(" × ")}` : n.op, n.x + (leaf ? 0 : 2), n.y + 8, n.w - 18);
  }
  if (!selected && !current && !hit) return;
  c.strokeStyle = hit && !selected && !current ? theme.accent : theme.mark;
  c.lineWidth = Math.max(3, 2 / scale);
  c.strokeRect(x - 3, y - 3, n.w + 6, n.h + 6);
}
