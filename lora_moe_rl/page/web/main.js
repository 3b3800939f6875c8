"use strict";
// The frame: which runs there are and are chosen, which view is shown, and what is new.

const EVERY = 4000; // milliseconds between two looks at what is new
const FIRST_CHOICE = 3;

const settingsView = {
  mount(root) { this.root = root; },

  async update(newest) {
    const runs = chosenRuns(), found = await Promise.all(runs.map((run) => source.settings(run)));
    if (!newest()) return;
    const keys = [...new Set(found.flatMap(({ settings }) => Object.keys(settings)))];
    const text = (i, key) => (key in found[i].settings ? textOf(found[i].settings[key] ?? null) : "–");
    const differs = (key) => runs.some((_, i) => text(i, key) !== text(0, key));
    const several = runs.length > 1, shown = several && state.differ ? keys.filter(differs) : keys;
    const only = several && h("label", null, h("input", { type: "checkbox", id: "only-differ", checked: Boolean(state.differ), onchange: (event) => go({ differ: event.target.checked ? "1" : "" }, true) }), "only what differs");
    const row = (key) => h("tr", { class: several && differs(key) ? "differs" : null }, h("td", null, key), runs.map((_, i) => h("td", { class: "value" }, text(i, key))));
    fill(this.root, h("div", { class: "tools" }, only), shown.length ? h("div", { class: "card scroll" }, h("table", null,
      h("thead", null, h("tr", null, h("th", null, "setting"), runs.map((run) => h("th", null, swatch(colorOf(run), dashOf(run)), run)))), h("tbody", null, shown.map(row))))
      : h("p", { class: "empty" }, runs.length ? "These runs have the same settings." : "Choose a run."));
  },
};

const VIEWS = {
  curves: ["Curves", curves], samples: ["Samples", samplesView], routes: ["Routes", routesView],
  adapter: ["Adapter", adapterView], timeline: ["Timeline", timelineView], settings: ["Settings", settingsView],
};

let state_runs = []; // all runs, the newest first
let root = "", shownView = "", renders = 0, busy = Promise.resolve();

/** The runs that are chosen, in the order of the list; at first, the newest. */
function chosenRuns() {
  const every = state_runs.map(({ name }) => name), wanted = listed(state.runs);
  if (!state.runs) return every.slice(0, FIRST_CHOICE);
  return every.filter((name) => wanted.includes(name));
}
const focusedRun = () => (chosenRuns().includes(state.run) ? state.run : chosenRuns()[0]);
/** Of those that the address names, the ones that are not there. */
const missingRuns = () => listed(state.runs).filter((name) => !state_runs.some((run) => run.name === name));
const colorOf = (run) => COLORS[Math.max(0, chosenRuns().indexOf(run)) % COLORS.length];

const dashOf = (run) => DASHES[Math.floor(Math.max(0, chosenRuns().indexOf(run)) / COLORS.length) % DASHES.length];

/** Which of the chosen runs a view of one shows. */
function runChoice() {
  const runs = chosenRuns(), given = { "aria-label": "run", id: "run-choice", onchange: (event) => go({ run: event.target.value, n: "", offset: "0", at: "", step: "", layer: "" }) };
  return runs.length > 1 ? h("select", given, runs.map((run) => h("option", { value: run, selected: run === focusedRun() }, run))) : null;
}

/** A run in the list at the side. It stays the same element, whatever is new of the run: the focus and
 * a press that has begun stay on it. */
class Row {
  constructor(name) {
    this.box = h("input", { type: "checkbox", id: `choose-${name}`, "data-run": name, onchange: () => toggle(name) });
    [this.kind, this.step, this.bar] = [h("small"), h("small"), h("i")];
    this.element = h("label", { class: "run" }, this.box, h("span", null, h("b", null, name), this.kind, this.step, h("div", { class: "bar" }, this.bar)));
  }

  show({ name, step, steps, model, algorithm }) {
    this.box.checked = chosenRuns().includes(name);
    this.element.style.setProperty("--run", this.box.checked ? colorOf(name) : "var(--faint)");
    this.kind.textContent = [algorithm, model?.split("/").at(-1)].filter(Boolean).join(" · ");
    this.step.textContent = `step ${number(step)}${steps ? ` of ${number(steps)}` : ""}`;
    this.bar.style.width = `${steps ? Math.min(100, (100 * step) / steps) : 0}%`;
    return this.element;
  }
}

function toggle(name) {
  const chosen = chosenRuns(), next = chosen.includes(name) ? chosen.filter((one) => one !== name) : [...chosen, name];
  if (next.length) go({ runs: joined(next), n: "", offset: "0" });
  else drawSide(); // one stays
}

function drawSide() {
  if (!side.list) {
    side.filter = h("input", { type: "search", placeholder: "filter runs", "aria-label": "filter runs", oninput: drawSide });
    side.list = h("div", { id: "runs" });
    fill(byId("side"), h("h1", null, "lora-moe-rl"), h("p", { class: "root" }, root), side.filter, side.list);
  }
  side.filter.hidden = state_runs.length < 8;
  const words = side.filter.value.toLowerCase(), shown = state_runs.filter(({ name }) => name.toLowerCase().includes(words));
  for (const { name } of shown) if (!side.rows.has(name)) side.rows.set(name, new Row(name));
  const elements = shown.map((run) => side.rows.get(run.name).show(run));
  if (elements.length !== side.list.children.length || elements.some((one, i) => one !== side.list.children[i])) fill(side.list, elements);
}
const side = { rows: new Map() };

function drawTabs() {
  const link = ([view, [label]]) => h("a", { id: `tab-${view}`, onclick: (event) => { event.preventDefault(); go({ view }); } }, label);
  if (!byId("tabs").children.length) fill(byId("tabs"), Object.entries(VIEWS).map(link), h("span", { class: "live" }, source.live ? "live" : "a snapshot"));
  for (const view of Object.keys(VIEWS)) {
    byId(`tab-${view}`).href = address({ view });
    byId(`tab-${view}`).ariaCurrent = view === state.view ? "page" : null;
  }
}

/** Does what may fail, and says on the page what did. */
async function attempt(call) {
  const box = byId("trouble");
  try {
    const found = await call();
    box.hidden = true;
    return found;
  } catch (error) {
    box.hidden = false;
    box.textContent = error instanceof TypeError && source.live ? `The server does not answer; is \`lora-moe-rl view\` still running? (${error.message})` : error.message;
    return undefined;
  }
}

/** Shows the state. A view's `update(newest)` waits for answers; once `newest()` is false, something
 * else was asked for meanwhile, and what it waited for is not shown. */
function render() {
  if (!(state.view in VIEWS)) state.view = DEFAULTS.view;
  drawSide();
  drawTabs();
  byId("missing").hidden = !missingRuns().length;
  byId("missing").textContent = `Not there${root && ` below ${root}`}: ${missingRuns().join(", ")}.`;
  const view = VIEWS[state.view][1];
  if (shownView !== state.view) {
    shownView = state.view;
    charts.clear();
    tip();
    view.mount(byId("view"));
  }
  const mine = ++renders;
  busy = attempt(() => view.update(() => mine === renders));
  return busy;
}

/** Looks at what is new, while the page is in sight. */
async function look() {
  await busy; // what is slow to come is shown before it is asked for anew
  if (!document.hidden) {
    const before = JSON.stringify(state_runs);
    const found = await attempt(() => source.runs());
    if (found) {
      state_runs = found.runs;
      const grown = await attempt(() => Promise.all(chosenRuns().filter((run) => metricStore.of.has(run)).map((run) => metricStore.refresh(run))));
      const idle = !["samples", "adapter"].includes(state.view) || !byId("view").contains(document.activeElement);
      if (JSON.stringify(state_runs) !== before && idle) render();
      else if (grown?.some(Boolean)) for (const chart of charts) curves.paint(chart);
    }
  }
  setTimeout(look, EVERY);
}

async function begin() {
  const found = await attempt(() => source.runs());
  if (!found) return void setTimeout(begin, EVERY);
  state_runs = found.runs;
  root = found.root;
  render();
  if (source.live) setTimeout(look, EVERY);
}

addEventListener("resize", settled(() => {
  for (const chart of charts) curves.paint(chart);
  if (state.view === "timeline") render();
}, 150));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { shownView = ""; curves.drawn = ""; render(); });
begin();
