/** Starts the page: header, views, selection panel and time bar. */
import { drawAll } from "./canvas";
import { consistent, type Context } from "./context";
import { LIVE_SCHEMA, SCHEMA } from "./data";
import { Dataset, loadTables, readReport } from "./dataset";
import { Details } from "./details";
import { button, field, h, select } from "./dom";
import { shortName } from "./format";
import { installKeys } from "./keys";
import { startLive } from "./live";
import { Panes } from "./panes";
import { readTheme, type Theme } from "./palette";
import { Store, toFragment, type Selection } from "./selection";
import { Tabs } from "./tabs";
import { ThemeSwitch } from "./theme";
import { TimeBar } from "./timebar";
import { VIEWS } from "./views";
import "./style.css";

function start(): void {
  const app = document.getElementById("app")!;
  const report = readReport();
  if (report.schema === LIVE_SCHEMA) return startLive(app);
  if (report.schema !== SCHEMA) {
    app.append(h("p", { role: "alert" }, `The data has the schema ${report.schema}, but this page reads ${SCHEMA}.`));
    return;
  }
  const datasets = report.inputs.map((input, i) => new Dataset(i, input));
  const store = new Store();
  let colors: Theme = readTheme();
  const context: Context = {
    report, datasets, store, theme: () => colors,
    duration: Math.max(1, ...report.inputs.map((i) => i.duration)),
    select: (patch) => store.set(consistent(patch, store.value, datasets)),
  };

  const main = new Panes(context, VIEWS, "main-panes", "");
  const below = new Panes(context, VIEWS, "below-panes", " (second view)");
  const details = new Details(context);
  const timebar = new TimeBar(context);
  const tabs = new Tabs(VIEWS, (view) => context.select({ view }));
  const belowSelect = select("Second view below", [["", "none"], ...VIEWS.map((v): [string, string] => [v.id, v.title])], "", (id) => context.select({ below: id || null }));
  const inputSelect = select("Inputs", [["", "side by side"], ...datasets.map((d): [string, string] => [String(d.index), d.input.name])], "", (i) => context.select({ input: i === "" ? null : Number(i) }));
  const status = h("p", { class: "status", role: "status" }, "Loading the tables…");
  const printed = h("p", { class: "print-only" });

  const refresh = () => {
    const s = store.value;
    tabs.update(s.view);
    belowSelect.value = s.below ?? "";
    inputSelect.value = s.input === null ? "" : String(s.input);
    main.show(VIEWS.some((v) => v.id === s.view) ? s.view : "overview", s);
    below.show(s.below === s.view ? null : s.below, s);
    timebar.update(s);
  };
  const theme = new ThemeSwitch(() => {
    colors = readTheme();
    if (main.element.isConnected) refresh();
  });
  addEventListener("beforeprint", () => {
    printed.textContent = toFragment(store.value).replaceAll("&", ", ");
    drawAll();
  });
  const dialog = installKeys(context, {
    play: () => timebar.toggle(),
    theme: () => theme.toggle(),
    search: () => main.element.querySelector<HTMLInputElement>("input[type=search]")?.focus(),
  });

  app.append(
    h("a", { class: "skip", href: "#main", onclick: (event: Event) => {
      event.preventDefault();
      document.getElementById("main")!.focus();
    } }, "Skip to the view"),
    h("header", { class: "top" },
      h("h1", { title: report.title }, report.inputs.map((i) => shortName(i.name)).join(" and ") || report.title), tabs.element,
      h("div", { class: "top-controls" }, datasets.length > 1 ? field("inputs", inputSelect) : null, field("below", belowSelect),
        button("Theme", () => theme.toggle(), { title: "Dark or light theme (t)" }), button("Keys", () => dialog.showModal(), { title: "Keys (?)" }))),
    timebar.element, status, printed,
    h("div", { class: "body" }, h("main", { id: "main", tabindex: "-1" }, main.element, below.element), details.element));

  const showDetails = (s: Selection) => details.update(s);
  store.subscribe((s, changed) => {
    refresh();
    if ([...changed].some((key) => key !== "time" && key !== "view" && key !== "below")) showDetails(s);
  });
  refresh();
  showDetails(store.value);

  const load = () => {
    loadTables(datasets, (data, name) => {
      if (name === "records") timebar.setStarts(data.index, data.records!.start);
      refresh();
      showDetails(store.value);
    }, (message) => {
      status.classList.add("error");
      status.textContent = message;
    }).then(() => {
      if (!status.classList.contains("error")) status.hidden = true;
      refresh();
      document.documentElement.dataset.ready = "true";
    });
  };
  // The data blocks follow this script. Paint before they are read.
  if (document.readyState === "loading") addEventListener("DOMContentLoaded", () => setTimeout(load));
  else setTimeout(load);
}

start();
