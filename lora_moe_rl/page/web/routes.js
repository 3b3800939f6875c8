"use strict";
// Which experts the tokens of a run went to: of one step all layers, of one layer the steps; and what
// has a value for each layer and step, of all chosen runs.

const LAYER = /^(.*)\/layer_(\d+)$/;
const MOST_COLUMNS = 400;
const TALL = 420; // pixels of a picture with a row for each expert, at most
const CHOSEN_BY = {
  r3: "as the engine chose them in the rollout, replayed by the trainer", r2: "as the trainer chose them before the update",
  off: "as the trainer's routers chose them in the update: nothing is replayed",
};
const MEANINGS = [
  ["replay/disagreement", "the share of routes that the trainer's own router would have chosen differently than the engine did"],
  ["experts/busiest", "how often the busiest expert of a layer is chosen, over the mean"],
];

const routesView = {
  mount(root) {
    const step = (value) => go({ step: Number(value) >= Number(this.slider.max) ? "" : String(value) }, true);
    const slow = settled(step, 60);
    this.slider = h("input", { type: "range", id: "route-step", "aria-label": "step", style: { width: "260px" }, oninput: (event) => { this.at.textContent = number(Number(event.target.value)); slow(event.target.value); } });
    this.at = h("output", { class: "num" });
    this.layer = h("select", { id: "route-layer", "aria-label": "layer", onchange: (event) => go({ layer: event.target.value }, true) });
    this.run = h("span");
    this.tools = h("div", { class: "tools" }, this.run, h("label", null, "step", this.slider, this.at), h("label", null, "layer by step", this.layer));
    this.loads = h("div", { id: "loads" });
    this.more = h("div", { id: "by-layer" });
    this.ofLayer = this.drawn = { of: "" };
    fill(root, this.tools, this.loads, this.more);
  },

  async update(newest) {
    const runs = chosenRuns(), run = focusedRun();
    if (!run) return;
    const [found] = await Promise.all([source.routes(run, state.step), this.drawLayers(runs)]);
    const layers = found.shown?.layers || [];
    const byStep = layers.length ? await this.layerBySteps(run, layers.includes(Number(state.layer)) && state.layer !== "" ? Number(state.layer) : layers[0], found.newest) : null;
    if (!newest()) return;
    fill(this.run, runChoice());
    this.found = { ...found, byStep };
    this.drawLoads(run, this.found);
  },

  /** The same as long as there is no new step. */
  async layerBySteps(run, layer, newest) {
    const of = [run, layer, newest].join("/");
    if (this.ofLayer.of !== of) this.ofLayer = { of, found: await source.layerRoutes(run, layer) };
    return this.ofLayer.found;
  },

  async drawLayers(runs) {
    await Promise.all(runs.map(needLayers));
    const of = JSON.stringify(runs.map((run) => [run, metricStore.table(run).lines]));
    if (this.drawn.of === of) return;
    this.drawn = { of };
    const maps = runs.flatMap((run) => layerFamilies(run).map(([family, layers]) => layersBySteps(run, family, layers)));
    fill(this.more, maps.length ? [h("h2", null, "By layer and step"), h("p", { class: "dim" }, "Layers from above, steps from the left. ", MEANINGS.map(([name, text]) => [h("code", null, name), `: ${text}. `])), maps]
      : h("p", { class: "empty" }, "These runs have no metric of single layers."));
  },

  drawLoads(run, { first, newest, shown, byStep }) {
    for (const label of this.tools.querySelectorAll("label")) label.hidden = !byStep;
    if (!byStep) return void fill(this.loads, h("p", { class: "empty" }, `${run} has no routes.jsonl yet: how often experts were chosen is counted for each step of a model with experts.`));
    Object.assign(this.slider, { min: first, max: newest });
    if (document.activeElement !== this.slider) this.slider.value = shown.step;
    this.at.textContent = number(shown.step);
    const layers = shown.layers;
    fill(this.layer, layers.map((layer) => h("option", { value: String(layer), selected: layer === byStep.layer }, `layer ${layer}`)));
    fill(this.loads,
      h("p", { class: "dim" }, `Of step ${number(shown.step)}, ${CHOSEN_BY[shown.replay] || ""}. A value is how often an expert was chosen over the mean of its layer's: 1 where all are chosen equally often. All prompts and responses of the step count, each token once for each expert it goes to. The experts of single tokens are not kept.`),
      loadsByLayer(run, shown, byStep.layer), (this.ofLayer.picture ||= loadsBySteps(byStep)));
  },
};

/** Of one step: layers from above, experts from the left. */
function loadsByLayer(run, { step, layers, loads }, chosen) {
  const means = loads.map(meanOf), values = loads.map((row, i) => row.map((count) => (means[i] ? count / means[i] : null)));
  const facts = (row, column) => [["chosen", number(loads[row][column])], ["share of the layer", `${number((100 * loads[row][column]) / (means[row] * loads[row].length))} %`]];
  return heatMap(`load of experts · ${run} · step ${number(step)}, experts from the left`, layers.map((layer) => `layer ${layer}`), values, (row, column) => `layer ${layers[row]}, expert ${column}`, 66,
    { facts, chosen: layers.indexOf(chosen), pick: (row) => go({ layer: String(layers[row]) }, true) });
}

/** Of one layer: experts from above, steps from the left. */
function loadsBySteps({ layer, steps, loads }) {
  const means = loads.map(meanOf), experts = loads[0]?.map((_, expert) => expert) || [];
  const values = experts.map((expert) => loads.map((row, i) => (means[i] ? row[expert] / means[i] : null)));
  const tall = Math.max(2, Math.min(ROW, Math.floor(TALL / Math.max(experts.length, 1))));
  return heatMap(`load of experts · layer ${layer}, experts from above, ${steps.length} steps from the left`, experts.map(String), values, (row, column) => `layer ${layer}, expert ${row}, step ${steps[column]}`, 66,
    { tall, facts: (row, column) => [["chosen", number(loads[column][row])]], pick: (_, column) => go({ step: String(steps[column]) }, true) });
}

const meanOf = (counts) => counts.reduce((sum, count) => sum + count, 0) / counts.length;

/** [[family, [[layer, metric], …]], …] of a run's metrics of single layers. */
function layerFamilies(run) {
  const families = new Map();
  for (const name of Object.keys(metricStore.table(run).columns)) {
    const found = LAYER.exec(name);
    if (found) families.set(found[1], [...(families.get(found[1]) || []), [Number(found[2]), name]]);
  }
  return [...families].sort();
}

async function needLayers(run) {
  const { names } = await source.names(run);
  await metricStore.need(run, names.filter((name) => LAYER.test(name)));
}

/** Where there are more steps than columns, a column is the largest value of some. */
function layersBySteps(run, family, layers) {
  const series = layers.sort((a, b) => a[0] - b[0]).map(([, name]) => new Map(metricStore.series(run, name)));
  const steps = [...new Set(series.flatMap((one) => [...one.keys()]))].sort((a, b) => a - b);
  const each = Math.ceil(steps.length / MOST_COLUMNS) || 1, columns = [];
  for (let i = 0; i < steps.length; i += each) columns.push(steps.slice(i, i + each));
  const largestOf = (one, some) => some.reduce((most, step) => (one.has(step) ? Math.max(most ?? -Infinity, one.get(step)) : most), null);
  const values = series.map((one) => columns.map((some) => largestOf(one, some)));
  const span = (some) => (some.length > 1 ? `steps ${some[0]}–${some.at(-1)}, largest` : `step ${some[0]}`);
  return heatMap(`${family} · ${run}`, layers.map(([layer]) => `layer ${layer}`), values, (row, column) => `layer ${layers[row][0]}, ${span(columns[column])}`, 66);
}
