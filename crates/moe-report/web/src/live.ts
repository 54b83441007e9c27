/** The page of a server: its state, which is polled, with the components of the report. */
import type { Context, View } from "./context";
import type { Chart, Input, Report, Series } from "./data";
import { Dataset } from "./dataset";
import { button, field, h } from "./dom";
import { count, number, percent } from "./format";
import { readTheme } from "./palette";
import { Store } from "./selection";
import { ThemeSwitch } from "./theme";
import { ChartBox } from "./views/chart";
import { createExperts } from "./views/experts";

/** Body of `GET /ui/state`. The OpenAPI description of the server explains each key. */
interface State {
  schema: string;
  model: string;
  seconds: number;
  n_slots: number;
  n_running: number;
  n_queued: number;
  queue_capacity: number;
  prompt_tokens: number;
  generated_tokens: number;
  lanes: { name: string; tier: string; selections: number }[];
  requests: Request[];
  selected: { id: number; layers: { layer: number; selections: number[] }[]; prompt?: string; answer?: string } | null;
}

interface Request {
  id: number;
  outcome: string | null;
  n_prompt: number;
  n_generated: number;
  queue_seconds: number;
  seconds: number;
}

/** Time between two polls in ms, and the number of states that the charts show: 10 minutes. */
const INTERVAL = 1000;
const HISTORY = 600;
const KEY = "moe-analyze-api-key";

/** Fraction of the selections in hot lanes between two states; null without selections. */
function hitRate(now: State, before: State | null): number | null {
  const sum = (state: State | null, hot: boolean) => (state?.lanes ?? []).filter((l) => !hot || l.name !== "cold").reduce((n, l) => n + l.selections, 0);
  const all = sum(now, false) - sum(before, false);
  return all > 0 ? (sum(now, true) - sum(before, true)) / all : null;
}

const seconds = (s: number) => `${number(Math.round(s * 100) / 100)} s`;

class Live {
  private history: State[] = [];
  private charts: [ChartBox, () => Series[]][] = [];
  private context: Context;
  private model = h("h1");
  private status = h("p", { class: "status", role: "status" }, "Connecting to the server…");
  private tiles = h("dl", { class: "tiles" });
  private chartGrid = h("div", { class: "chart-grid" });
  private rows = h("tbody");
  private detail = h("section", { class: "pane live-detail", "aria-label": "Selected request" });
  private heading = h("h2", { class: "pane-title" }, "Select a request to see its experts.");
  private text = h("div", { class: "live-text" });
  private experts: { view: View; data: Dataset; shape: string } | null = null;
  private request: number | null = null;
  private login: HTMLFormElement;
  private theme: ThemeSwitch;
  private timer = 0;
  private polls = 0;

  constructor(app: HTMLElement) {
    let colors = readTheme();
    const store = new Store();
    const report: Report = { schema: "", title: "", program: "", inputs: [], charts: [], notes: [] };
    this.context = { report, datasets: [], store, theme: () => colors, duration: 1, select: (patch) => store.set(patch) };
    const redraw = () => {
      for (const [box] of this.charts) box.update(store.value);
      this.experts?.view.update(store.value);
    };
    this.theme = new ThemeSwitch(() => {
      colors = readTheme();
      redraw();
    });
    store.subscribe(redraw);
    const key = h("input", { type: "password", autocomplete: "off", required: true });
    this.login = h("form", { class: "login", hidden: true, onsubmit: (event: Event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, key.value);
      this.poll();
    } }, field("API key of the server", key), h("button", { type: "submit" }, "Connect"));
    this.detail.append(this.heading, this.text);
    const columns = ["request", "state", "prompt tokens", "generated tokens", "queue (s)", "total (s)", "tokens/s"];
    app.append(
      h("header", { class: "top" }, this.model, h("div", { class: "top-controls" }, button("Theme", () => this.theme.toggle(), { title: "Dark or light theme" }))),
      this.status, this.login,
      h("main", { class: "live", id: "main" }, this.tiles, this.chartGrid,
        h("div", { class: "live-requests" },
          h("section", { class: "pane scroll", "aria-label": "Recent requests", tabindex: "0" }, h("h2", { class: "pane-title" }, "Recent requests"),
            h("table", { class: "requests" }, h("thead", {}, h("tr", {}, ...columns.map((c) => h("th", { scope: "col" }, c)))), this.rows)),
          this.detail)));
    this.poll();
  }

  private async poll(): Promise<void> {
    clearTimeout(this.timer);
    // A later call replaces this one.
    const poll = ++this.polls;
    const key = sessionStorage.getItem(KEY);
    let message = "";
    try {
      const query = this.request === null ? "" : `?request=${this.request}`;
      const response = await fetch(`ui/state${query}`, { headers: key === null ? {} : { "X-Api-Key": key }, cache: "no-store" });
      const state = response.ok ? ((await response.json()) as State) : null;
      if (poll !== this.polls) return;
      this.login.hidden = response.status !== 401;
      if (response.status === 401) {
        this.status.hidden = false;
        this.status.textContent = key === null ? "The server needs an API key." : "The API key is wrong.";
        return;
      }
      if (state) this.show(state);
      else message = `The server answers with status ${response.status}.`;
    } catch {
      message = "The server does not answer. The page tries again.";
    }
    if (poll !== this.polls) return;
    this.status.hidden = message === "";
    this.status.classList.toggle("error", message !== "");
    if (this.status.textContent !== message) this.status.textContent = message;
    this.timer = window.setTimeout(() => void this.poll(), INTERVAL);
  }

  private show(state: State): void {
    const last = this.history.at(-1);
    if (last && last.seconds > state.seconds) this.history = [];
    // Details of requests are not part of the history.
    this.history.push({ ...state, requests: [], selected: null });
    if (this.history.length > HISTORY) this.history.shift();
    this.model.textContent = state.model;
    if (this.charts.length === 0) this.createCharts(state);
    for (const [box, series] of this.charts) box.setSeries(series());
    this.showTiles(state);
    const focused = this.rows.contains(document.activeElement) ? document.activeElement!.textContent : null;
    this.rows.replaceChildren(...state.requests.map((r) => this.row(r)));
    if (focused !== null) [...this.rows.querySelectorAll("button")].find((b) => b.textContent === focused)?.focus();
    this.showSelected(state);
    document.documentElement.dataset.ready = "true";
  }

  /** A series of a value of each state and the one before. */
  private series(name: string, value: (now: State, before: State | null) => number | null): Series {
    const { history } = this;
    return { name, x: history.map((s) => s.seconds), y: history.map((s, i) => value(s, history[i - 1] ?? null)), style: "line" };
  }

  private createCharts(state: State): void {
    const rate = (key: "prompt_tokens" | "generated_tokens") => (now: State, before: State | null) =>
      (before ? (now[key] - before[key]) / Math.max(1e-3, now.seconds - before.seconds) : null);
    const add = (id: string, title: string, y: string, max: number | null, series: () => Series[]) => {
      const chart: Chart = { id, group: "live", title, x: { label: "time since the start (s)", scale: "linear" }, y: { label: y, scale: "linear", min: 0, max }, series: series() };
      const box = new ChartBox(this.context, chart);
      this.charts.push([box, series]);
      this.chartGrid.append(box.element);
    };
    add("speed", "Speed", "tokens/s", null, () => [this.series("generated", rate("generated_tokens")), this.series("prompt", rate("prompt_tokens"))]);
    add("queue", "Requests", "requests", null, () => [this.series("running", (s) => s.n_running), this.series("queued", (s) => s.n_queued)]);
    if (state.lanes.length < 2) return;
    const hot = state.lanes.length > 2;
    add("lanes", "Lanes of the expert cache", "selections (%)", 100, () => [
      // With one hot lane, its selections are the hits.
      ...(hot ? [this.series("hit rate", (now, before) => {
        const rate = before ? hitRate(now, before) : null;
        return rate === null ? null : 100 * rate;
      })] : []),
      ...state.lanes.map((lane, i) => this.series(`${lane.name} (${lane.tier})`, (now, before) => {
        if (!before) return null;
        const of = (s: State) => s.lanes.reduce((n, l) => n + l.selections, 0);
        const all = of(now) - of(before);
        return all > 0 ? (100 * (now.lanes[i].selections - before.lanes[i].selections)) / all : null;
      })),
    ]);
  }

  private showTiles(state: State): void {
    const { history } = this;
    // The mean of 5 seconds, so that the number can be read.
    const before = history[Math.max(0, history.length - 6)];
    const rate = (key: "prompt_tokens" | "generated_tokens") => number(Math.round((10 * (state[key] - before[key])) / Math.max(1, state.seconds - before.seconds)) / 10);
    const recent = hitRate(state, before);
    const total = hitRate(state, null);
    const tiles: [string, string][] = [
      ["generated tokens/s", rate("generated_tokens")],
      ["prompt tokens/s", rate("prompt_tokens")],
      ["running requests", `${state.n_running} of ${state.n_slots}`],
      ["queued requests", `${state.n_queued} of ${state.queue_capacity}`],
      ["hit rate, last 5 s", recent === null ? "–" : percent(recent)],
      ["hit rate, all", total === null ? "–" : percent(total)],
      ["generated tokens, all", count(state.generated_tokens)],
      ["prompt tokens, all", count(state.prompt_tokens)],
    ];
    this.tiles.replaceChildren(...tiles.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  }

  private row(r: Request): HTMLElement {
    const selected = r.id === this.request;
    const time = r.seconds - r.queue_seconds;
    const cells = [r.outcome?.replaceAll("_", " ") ?? "running", count(r.n_prompt), count(r.n_generated), number(r.queue_seconds), number(Math.round(r.seconds * 100) / 100),
      time > 0 ? number(r.n_generated / time) : "–"];
    const select = button(String(r.id), () => {
      this.request = r.id;
      void this.poll();
    }, { "aria-pressed": selected, "aria-label": `Show the experts of request ${r.id}` });
    return h("tr", { class: selected ? "selected" : null }, h("th", { scope: "row" }, select), ...cells.map((c) => h("td", {}, c)));
  }

  private showSelected({ selected, requests }: State): void {
    if (this.request === null || selected?.id !== this.request) {
      const next = requests[0]?.id;
      // The newest request is selected first, and if the selected one is no longer kept.
      if (next !== undefined && (this.request === null || selected === null)) {
        this.request = next;
        void this.poll();
      }
      return;
    }
    const r = requests.find((r) => r.id === selected.id);
    this.heading.textContent = `Experts of request ${selected.id}${r ? `: ${count(r.n_prompt + r.n_generated)} tokens, ${seconds(r.seconds)}` : ""}`;
    const block = (name: string, text: string | undefined) => (text === undefined ? [] : [h("h3", {}, name), h("p", { class: "live-pre" }, text)]);
    this.text.replaceChildren(...block("Prompt", selected.prompt), ...block("Answer", selected.answer));
    const { layers } = selected;
    const n = Math.max(0, ...layers.map((l) => l.selections.length));
    const shape = `${selected.id} ${layers.map((l) => l.layer)} ${n}`;
    if (this.experts?.shape !== shape) {
      const input: Input = {
        name: `request ${selected.id}`, kind: "", properties: [], notes: [], time_unit: "step", duration: 1, top_k: 0, files: [], tensors: [], ops: [], names: [],
        lanes: [], tracks: [], graphs: [], buffers: [], layers: layers.map((l) => ({ index: l.layer, n_expert: n, top_k: 0 })),
        tokens: { text: [], phase: [], sequence: [], position: [], start: [] },
      };
      const data = new Dataset(0, input);
      data.selections = new Uint32Array(layers.length * n);
      this.experts?.view.destroy?.();
      this.experts?.view.element.remove();
      const view = createExperts(this.context, data);
      this.experts = { view, data, shape };
      this.text.before(view.element);
    }
    const { view, data } = this.experts;
    layers.forEach((l, row) => data.selections!.set(l.selections, row * n));
    data.version++;
    view.update(this.context.store.value);
  }
}

export function startLive(app: HTMLElement): void {
  new Live(app);
}
