"use strict";
// What has a value for each layer: routes by step, and the adapter's norms by module and by expert.

const ROW = 16; // pixels of a layer

/** A picture of `rows` by columns, values [row][column]; null is a gap. `label(row, column)` names a place. */
function heatMap(title, rows, values, label, left) {
  const canvas = h("canvas", { role: "img", "aria-label": title, style: { height: `${rows.length * ROW}px` } });
  const every = values.flat().filter((value) => value !== null && value !== undefined);
  const most = every.reduce((a, b) => Math.max(a, b), 0);
  const at = (event) => {
    const box = canvas.getBoundingClientRect(), columns = values[0].length;
    const column = Math.floor(((event.clientX - box.left - left) / (box.width - left)) * columns), row = Math.floor((event.clientY - box.top) / ROW);
    return column >= 0 && column < columns && row >= 0 && row < rows.length ? [row, column] : null;
  };
  canvas.addEventListener("pointermove", (event) => {
    const found = at(event);
    if (found) tip(event, label(...found), [["", number(values[found[0]][found[1]])]]);
    else tip();
  });
  canvas.addEventListener("pointerleave", () => tip());
  const draw = () => {
    const { context: c, width } = canvasContext(canvas), rgb = css("--heat"), columns = values[0]?.length || 1, wide = (width - left) / columns;
    rows.forEach((name, row) => {
      c.fillStyle = css("--dim");
      c.textAlign = "right";
      c.fillText(name, left - 7, row * ROW + 12);
      for (let column = 0; column < columns; column++) {
        const value = values[row][column];
        if (value === null || value === undefined) continue;
        c.fillStyle = `rgba(${rgb}, ${0.05 + 0.9 * (most ? value / most : 0)})`;
        c.fillRect(left + column * wide, row * ROW, Math.max(wide - (wide > 5 ? 1 : 0), 1), ROW - 1);
      }
    });
  };
  new ResizeObserver(draw).observe(canvas); // also once it stands on the page
  return h("article", { class: "card heat" }, h("header", null, h("b", null, title), h("span", { class: "dim" }, `0 to ${number(most)}`)), canvas);
}

const LAYER = /^(.*)\/layer_(\d+)$/;
const MOST_COLUMNS = 400;

const routesView = {
  mount(root) { this.root = root; },

  async update() {
    const runs = chosenRuns(), shown = [];
    for (const run of runs) {
      const { names } = await source.names(run), families = new Map();
      for (const name of names) {
        const found = LAYER.exec(name);
        if (found) families.set(found[1], [...(families.get(found[1]) || []), [Number(found[2]), name]]);
      }
      await metricStore.need(run, [...families.values()].flat().map(([, name]) => name));
      for (const [family, layers] of families) shown.push(layersBySteps(run, family, layers));
    }
    fill(this.root, shown.length ? [h("p", { class: "dim" }, "Layers from above, steps from the left. ", h("code", null, "replay/disagreement"), ": the share of tokens for which the trainer's own router would choose another set of experts than the engine did."), shown]
      : h("p", { class: "empty" }, "These runs have no metric of single layers (router replay writes replay/disagreement/layer_NN)."));
  },
};

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

const adapterView = {
  mount(root) { this.root = root; this.of = null; },

  async update() {
    const run = focusedRun();
    if (!run || this.of === run) return;
    fill(this.root, h("div", { class: "tools" }, runChoice()), h("p", { class: "empty" }, "reading checkpoints …"));
    const { checkpoints } = await source.adapter(run);
    if (focusedRun() !== run) return;
    this.of = run;
    const good = checkpoints.filter((one) => one.sites), last = good.at(-1);
    const broken = checkpoints.filter((one) => one.error).map((one) => h("p", { class: "bad" }, `checkpoint of step ${one.step}: ${one.error}`));
    fill(this.root, h("div", { class: "tools" }, runChoice()), broken, last ? normsOf(good, last) : h("p", { class: "empty" }, "This run has kept no checkpoint yet."));
  },
};

function normsOf(checkpoints, { step, parameters, sites }) {
  const modules = [...new Set(sites.map((site) => site.module))], layers = [...new Set(sites.map((site) => site.layer))].sort((a, b) => a - b);
  const at = (layer, module) => sites.find((site) => site.layer === layer && site.module === module);
  const byModule = modules.map((module) => layers.map((layer) => at(layer, module)?.norm ?? null));
  const expertLayers = layers.filter((layer) => sites.some((site) => site.layer === layer && site.of_expert));
  const ofExperts = expertLayers.map((layer) => {
    const found = sites.filter((site) => site.layer === layer && site.of_expert).map((site) => site.of_expert);
    return found[0].map((_, expert) => Math.sqrt(found.reduce((sum, one) => sum + one[expert] ** 2, 0)));
  });
  return [
    h("p", { class: "dim" }, `Step ${step}, ${number(parameters)} parameters. A value is ‖scale · B A‖ (Frobenius): how far the adapter moves the weight.`),
    heatMap("norms by module, layers from the left", modules, byModule, (row, column) => `${modules[row]}, layer ${layers[column]}`, 120),
    expertLayers.length ? heatMap("norms by routed expert, experts from the left", expertLayers.map((layer) => `layer ${layer}`), ofExperts, (row, column) => `layer ${expertLayers[row]}, expert ${column}`, 66) : null,
    growth(checkpoints, modules),
  ];
}

/** Of each module, over its layers, in each checkpoint. */
function growth(checkpoints, modules) {
  const total = ({ sites }, module) => Math.sqrt(sites.filter((site) => site.module === module).reduce((sum, site) => sum + site.norm ** 2, 0));
  return h("div", { class: "card scroll" }, h("table", null,
    h("thead", null, h("tr", null, h("th", null, "norm over all layers"), checkpoints.map(({ step }) => h("th", { class: "num" }, `step ${step}`)))),
    h("tbody", null, modules.map((module) => h("tr", null, h("td", null, module), checkpoints.map((one) => h("td", { class: "num" }, number(total(one, module)))))))));
}
