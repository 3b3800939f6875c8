"use strict";
// Pictures of what has a value for each row and column, and the adapter's norms by module and by expert.

const ROW = 16; // pixels of a row

/** A picture of `rows` by columns, values [row][column]; null is a gap. `label(row, column)` names a place.
 * `tall`: pixels of a row, `pick(row, column)`: what a click does, `chosen`: a row that is marked,
 * `facts(row, column)`: what is said beside the value. */
function heatMap(title, rows, values, label, left, { tall = ROW, pick, chosen, facts } = {}) {
  const canvas = h("canvas", { role: "img", "aria-label": title, style: { height: `${rows.length * tall}px`, cursor: pick ? "pointer" : "default" } });
  const every = values.flat().filter((value) => value !== null && value !== undefined);
  const most = every.reduce((a, b) => Math.max(a, b), 0);
  const at = (event) => {
    const box = canvas.getBoundingClientRect(), columns = values[0].length;
    const column = Math.floor(((event.clientX - box.left - left) / (box.width - left)) * columns), row = Math.floor((event.clientY - box.top) / tall);
    return column >= 0 && column < columns && row >= 0 && row < rows.length ? [row, column] : null;
  };
  canvas.addEventListener("pointermove", (event) => {
    const found = at(event);
    if (found) tip(event, label(...found), [["", number(values[found[0]][found[1]])], ...(facts?.(...found) || [])]);
    else tip();
  });
  canvas.addEventListener("pointerleave", () => tip());
  canvas.addEventListener("click", (event) => { const found = pick && at(event); if (found) pick(...found); });
  const draw = () => {
    const { context: c, width } = canvasContext(canvas), rgb = css("--heat"), columns = values[0]?.length || 1, wide = (width - left) / columns;
    const gap = tall > 5 ? 1 : 0, named = Math.ceil(13 / tall);
    rows.forEach((name, row) => {
      c.fillStyle = css(row === chosen ? "--accent" : "--dim");
      c.textAlign = "right";
      if (row % named === 0) c.fillText(name, left - 7, row * tall + Math.min(12, tall + 6));
      for (let column = 0; column < columns; column++) {
        const value = values[row][column];
        if (value === null || value === undefined) continue;
        c.fillStyle = `rgba(${rgb}, ${0.05 + 0.9 * (most ? value / most : 0)})`;
        c.fillRect(left + column * wide, row * tall, Math.max(wide - (wide > 5 ? 1 : 0), 1), tall - gap);
      }
    });
  };
  new ResizeObserver(draw).observe(canvas); // also once it stands on the page
  const card = h("article", { class: "card heat" }, h("header", null, h("b", null, title), h("span", { class: "dim" }, `0 to ${number(most)}`)), canvas);
  card.values = values;
  return card;
}

const adapterView = {
  mount(root) { this.root = root; this.of = null; },

  async update(newest) {
    const run = focusedRun();
    if (!run || this.of === run) return;
    fill(this.root, h("div", { class: "tools" }, runChoice()), h("p", { class: "empty" }, "reading checkpoints …"));
    const { checkpoints, error } = await source.adapter(run);
    if (!newest()) return;
    this.of = run;
    const good = checkpoints.filter((one) => one.sites), last = good.at(-1);
    const broken = checkpoints.filter((one) => one.error).map((one) => h("p", { class: "bad" }, `checkpoint of step ${one.step}: ${one.error}`));
    if (error) broken.push(h("p", { class: "bad" }, `checkpoints cannot be looked for: ${error}`));
    fill(this.root, h("div", { class: "tools" }, runChoice()), broken, last ? normsOf(good, last) : !error && h("p", { class: "empty" }, "This run has kept no checkpoint yet."));
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
