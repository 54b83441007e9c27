/** The text of the tokens, and the experts of the selected token in each layer. */
import { tokensOfExpert } from "../analysis";
import type { Context, View } from "../context";
import type { Dataset } from "../dataset";
import { announce, field, h, select } from "../dom";
import { count, percent, running, visible } from "../format";
import { heat } from "../palette";
import type { Selection } from "../selection";
import { TokenExperts } from "./token-experts";

/** Tokens of a block. Browsers skip the layout of blocks outside the window. */
const BLOCK = 400;

export function createTokens(context: Context, data: Dataset): View {
  return new TokensView(context, data);
}

class TokensView implements View {
  readonly element: HTMLElement;
  private spans: HTMLElement[] = [];
  private text: HTMLElement;
  private experts: TokenExperts;
  private color: "selection" | "hits" | "none" = "selection";
  private legend = h("span", { class: "muted" });
  private key = "";
  private current = -1;
  private hitRate: Float32Array | null = null;

  constructor(private context: Context, private data: Dataset) {
    this.text = h("div", {
      class: "token-text scroll", role: "listbox", tabindex: "0", "aria-label": `Tokens of ${data.input.name}`,
      onclick: (event: MouseEvent) => this.click(event), onkeydown: (event: KeyboardEvent) => this.onKey(event),
    });
    this.build();
    this.experts = new TokenExperts(context, data);
    const options: [string, string][] = [["selection", "use of the selected expert"], ["none", "phase only"]];
    if (data.input.lanes.length) options.splice(1, 0, ["hits", "hit rate"]);
    const color = select("Color of the tokens", options, "selection", (value) => {
      this.color = value as typeof this.color;
      this.key = "";
      this.update(context.store.value);
    });
    this.element = h("div", { class: "view tokens" },
      h("div", { class: "toolbar" }, field("color", color), this.legend),
      h("div", { class: "token-columns" }, this.text, this.experts.element));
  }

  update(selection: Selection): void {
    this.paint(selection);
    const token = selection.token ?? -1;
    if (token !== this.current) {
      this.spans[this.current]?.setAttribute("aria-selected", "false");
      this.current = token;
      const span = this.spans[token];
      span?.setAttribute("aria-selected", "true");
      span?.scrollIntoView({ block: "nearest" });
      if (span) this.text.setAttribute("aria-activedescendant", span.id);
      else this.text.removeAttribute("aria-activedescendant");
    }
    this.experts.update(selection);
  }

  private build(): void {
    const { tokens } = this.data.input;
    let group: HTMLElement | null = null;
    let inGroup = 0;
    let sequence = -1;
    tokens.text.forEach((text, i) => {
      if (!group || inGroup >= BLOCK || tokens.sequence[i] !== sequence) {
        const changed = tokens.sequence[i] !== sequence;
        sequence = tokens.sequence[i];
        inGroup = 0;
        group = h("div", { class: changed ? "token-block first" : "token-block", role: "group", "aria-label": `sequence ${sequence}, from token ${i}` });
        if (changed && tokens.sequence[tokens.sequence.length - 1] !== tokens.sequence[0]) group.dataset.sequence = `sequence ${sequence}`;
        this.text.append(group);
      }
      inGroup++;
      const span = h("span", {
        class: tokens.phase[i] === 0 ? "token prompt" : "token", role: "option", "aria-selected": "false", id: `t${this.data.index}-${i}`,
      }, running(text, tokens.position[i]));
      if (text === null) span.classList.add("unknown");
      this.spans.push(span);
      group.append(span);
      if (text?.includes("\n")) group.append(document.createElement("br"));
    });
    if (tokens.text.length === 0) this.text.append(h("p", { class: "muted" }, "The input contains no tokens."));
  }

  /** Colours the tokens that select the selected expert, or by hit rate. */
  private paint(selection: Selection): void {
    const { data, color } = this;
    const { layer, expert } = selection;
    const key = `${color} ${layer} ${expert} ${selection.time} ${data.routing !== null}`;
    if (key === this.key) return;
    this.key = key;
    const uses = color === "selection" && layer !== null && expert !== null ? tokensOfExpert(data, layer, expert) : null;
    const hits = color === "hits" ? this.hits() : null;
    let marked = 0;
    const { start } = data.input.tokens;
    this.spans.forEach((span, i) => {
      const { classList, style } = span;
      classList.toggle("uses", uses !== null && uses[i] === 1);
      if (uses?.[i]) marked++;
      classList.toggle("outside", selection.time !== null && (data.tokenEnd[i] <= selection.time[0] || start[i] >= selection.time[1]));
      const value = hits?.[i] ?? NaN;
      style.background = Number.isNaN(value) ? "" : heat(value);
      style.color = Number.isNaN(value) ? "" : value > 0.55 ? "#000" : "#fff";
    });
    this.legend.textContent = uses
      ? `${count(marked)} of ${count(this.spans.length)} tokens (${percent(marked / Math.max(1, this.spans.length))}) select expert ${expert} of layer ${layer}`
      : hits ? "dark: low hit rate, bright: high hit rate" : color === "selection" ? "select an expert to mark the tokens that use it" : "";
  }

  /** Fraction of a token's experts that were computed from a cache or on a GPU. */
  private hits(): Float32Array | null {
    const { routing, input } = this.data;
    if (this.hitRate || !routing?.lanes.length) return this.hitRate;
    const isHit = input.lanes.map((lane) => ["gpu_resident", "hot_cache", "post_fetched", "cache_hit"].includes(lane));
    const sum = new Float32Array(input.tokens.text.length);
    const all = new Float32Array(sum.length);
    for (const lane of routing.lanes) {
      for (let i = 0; i < routing.rows; i++) {
        if (lane[i] < 0) continue;
        all[routing.token[i]]++;
        if (isHit[lane[i]]) sum[routing.token[i]]++;
      }
    }
    this.hitRate = sum.map((s, i) => s / all[i]);
    return this.hitRate;
  }

  private click(event: MouseEvent): void {
    const span = (event.target as HTMLElement).closest(".token");
    if (span) this.choose(Number(span.id.split("-")[1]));
  }

  private choose(token: number): void {
    this.context.select({ token });
    const { tokens } = this.data.input;
    announce(`token ${token}, ${tokens.phase[token] === 0 ? "prompt" : "generated"}: ${visible(tokens.text[token], tokens.position[token])}`);
  }

  private onKey(event: KeyboardEvent): void {
    const last = this.spans.length - 1;
    const at = this.current;
    const next: Record<string, number> = { ArrowRight: at + 1, ArrowDown: at + 10, ArrowLeft: at - 1, ArrowUp: at - 10, Home: 0, End: last };
    if (!(event.key in next) || last < 0) return;
    event.preventDefault();
    this.choose(Math.max(0, Math.min(last, next[event.key])));
  }
}
