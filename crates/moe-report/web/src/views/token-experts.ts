/** The experts of the selected token: a row for each layer. */
import { routeOf } from "../analysis";
import type { Context } from "../context";
import type { Dataset } from "../dataset";
import { h } from "../dom";
import { visible } from "../format";
import { laneColor } from "../palette";
import type { Selection } from "../selection";

export class TokenExperts {
  readonly element: HTMLElement;
  private body = h("tbody");
  private title = h("h3");
  private table: HTMLElement;
  private lanes = h("ul", { class: "lane-legend", "aria-label": "Lanes" });
  private key = "";

  constructor(context: Context, private data: Dataset) {
    const columns = Array.from({ length: data.input.top_k }, (_, k) => h("th", { scope: "col" }, String(k + 1)));
    this.table = h("table", { class: "expert-table" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "layer"), ...columns)), this.body);
    this.element = h("section", { class: "token-experts scroll", tabindex: "0", "aria-label": `Experts of the selected token of ${data.input.name}` },
      this.title, this.lanes, this.table);
    this.body.addEventListener("click", (event) => {
      const cell = (event.target as HTMLElement).closest<HTMLElement>("button[data-expert]");
      if (cell) context.select({ layer: Number(cell.dataset.layer), expert: Number(cell.dataset.expert) });
    });
  }

  update({ token, layer, expert }: Selection): void {
    const { data } = this;
    const key = `${token} ${layer} ${expert} ${data.routing !== null}`;
    if (key === this.key) return;
    const sameToken = this.key.split(" ")[0] === String(token);
    this.key = key;
    const { tokens } = data.input;
    const known = token !== null && token < tokens.text.length;
    this.title.textContent = known ? `Experts of token ${token} “${visible(tokens.text[token!], tokens.position[token!])}”, best first` : "Select a token to see its experts.";
    this.table.hidden = !known;
    if (!known) return;
    if (this.lanes.childElementCount === 0) this.showLanes();
    const scroll = this.element.scrollTop;
    this.body.replaceChildren(...data.input.layers.filter((l) => l.n_expert > 0).map((l) => this.row(l.index, token!, layer, expert)));
    if (sameToken) this.element.scrollTop = scroll;
  }

  /** Shows the lanes that the input uses. */
  private showLanes(): void {
    const used = new Set((this.data.routing?.lanes ?? []).flatMap((column) => [...new Set(column)]));
    const lanes = this.data.input.lanes.filter((_, i) => used.has(i));
    this.lanes.replaceChildren(...lanes.map((lane) => h("li", {}, h("span", { class: "swatch", style: `background:${laneColor(lane)}` }), lane)));
  }

  private row(layer: number, token: number, selected: number | null, expert: number | null): HTMLElement {
    const { routing, input } = this.data;
    const row = h("tr", { class: layer === selected ? "selected" : null }, h("th", { scope: "row" }, String(layer)));
    const r = routeOf(this.data, token, layer);
    for (let k = 0; k < input.top_k; k++) {
      const e = r < 0 ? -1 : routing!.experts[k][r];
      if (e < 0) {
        row.append(h("td", {}, r < 0 && k === 0 ? "–" : null));
        continue;
      }
      const lane = input.lanes[routing!.lanes[k]?.[r] ?? -1];
      const weight = routing!.weights[k]?.[r] ?? -1;
      const parts = [`layer ${layer}, expert ${e}`, lane, weight >= 0 ? `weight ${(weight / 255).toFixed(2)}` : null].filter(Boolean).join(", ");
      row.append(h("td", {}, h("button", {
        type: "button", class: layer === selected && e === expert ? "expert selected" : "expert", "data-layer": layer, "data-expert": e,
        "aria-label": parts, title: parts, style: lane ? `--lane:${laneColor(lane)};--weight:${weight < 0 ? 1 : weight / 255}` : null,
      }, String(e))));
    }
    return row;
  }
}
