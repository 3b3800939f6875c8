"use strict";
// Where the data come from: a server that is asked for what is shown, or this very file.

class Server {
  live = true;

  async ask(question, items) {
    const query = new URLSearchParams(items);
    const answer = await fetch(`api/${question}?${query}`);
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
    return found;
  }
  runs() { return this.ask("runs", []); }
  names(run) { return this.ask("names", { run }); }
  settings(run) { return this.ask("settings", { run }); }
  metrics(run, names, since, generation) {
    return this.ask("metrics", [["run", run], ["since", since], ["generation", generation], ...names.map((name) => ["name", name])]);
  }
  samples(run, choice, offset, limit) { return this.ask("samples", { run, ...choice, offset, limit }); }
  sample(run, number) { return this.ask("sample", { run, number }); }
  timeline(run, step, count) { return this.ask("timeline", { run, step, count }); }
  routes(run, step) { return this.ask("routes", { run, step }); }
  layerRoutes(run, layer) { return this.ask("layer_routes", { run, layer }); }
  adapter(run) { return this.ask("adapter", { run }); }
  traceLink(run) { return `api/trace?${new URLSearchParams({ run })}`; }
}

/** The same answers, from what stands in a page that was written with --static. */
class Embedded {
  live = false;

  constructor(data) { this.data = data; }
  of(run) { return this.data.of[run]; }
  async runs() { return { root: "", runs: this.data.runs }; }
  async names(run) { return { names: this.of(run).names }; }
  async settings(run) { return { settings: this.of(run).settings }; }
  async metrics(run) { return this.of(run).metrics; }
  async timeline(run) { return this.of(run).timeline; }
  async adapter(run) { return this.of(run).adapter; }
  async routes(run, step) {
    const { first, newest, records } = this.of(run).routes, upTo = records.filter((one) => !step || one.step <= Number(step));
    return { first, newest, shown: upTo.at(-1) || records[0] || null };
  }
  async layerRoutes(run, layer) {
    const kept = this.of(run).routes.records.filter((one) => one.layers.includes(layer));
    return { layer, steps: kept.map((one) => one.step), loads: kept.map((one) => one.loads[one.layers.indexOf(layer)]) };
  }
  async sample(run, number) {
    const found = this.of(run).samples.find((one) => one.number === Number(number));
    if (!found) throw new Error(`sample ${number} is not in this file`);
    return found;
  }
  async samples(run, choice, offset, limit) {
    const { samples, of_samples } = this.of(run);
    const chosen = samples.filter((one) => fits(one, choice));
    const by = choice.order.replace("-", ""), sign = choice.order.startsWith("-") ? -1 : 1;
    if (by === "newest") chosen.sort((a, b) => b.step - a.step);
    else if (by !== "oldest") chosen.sort((a, b) => (a[by] === null) - (b[by] === null) || sign * (a[by] - b[by]));
    const used = (key) => [...new Set(samples.map((one) => one[key]).filter(Boolean))].sort();
    return {
      samples: samples.length, of: of_samples, chosen: chosen.length,
      finish_reasons: used("finish_reason"), data_sets: used("data_set"),
      list: chosen.slice(offset, Number(offset) + limit).map(inBrief),
    };
  }
  traceLink() { return null; }
}

/** As the server has it (page/samples.py). */
function fits(one, choice) {
  const from = (value, bound) => !bound || (value !== null && value >= Number(bound));
  const to = (value, bound) => !bound || (value !== null && value <= Number(bound));
  return (
    from(one.step, choice.step_from) && to(one.step, choice.step_to) &&
    from(one.reward, choice.reward_from) && to(one.reward, choice.reward_to) &&
    (!choice.drawn || one.drawn === Number(choice.drawn)) &&
    (!choice.finish || one.finish_reason === choice.finish) &&
    (!choice.data_set || one.data_set === choice.data_set) &&
    (!choice.text || textsOf(one).toLowerCase().includes(choice.text.toLowerCase()))
  );
}

const textOf = (content) => (typeof content === "string" ? content : JSON.stringify(content ?? ""));
const messagesOf = (prompt) => (Array.isArray(prompt) ? prompt : [{ role: "prompt", content: prompt }]);
const textsOf = (one) =>
  [...messagesOf(one.prompt), ...(one.messages || [])].map((message) => textOf(message.content)).concat(one.response || "", one.failure || "").join("\n");

function inBrief(one) {
  const prompt = textOf(messagesOf(one.prompt).at(-1)?.content);
  return { ...one, prompt: prompt.slice(-240), response: (one.response || "").slice(0, 240), turns: (one.messages || []).length };
}

const source = typeof PAGE_DATA === "undefined" ? new Server() : new Embedded(PAGE_DATA);

/** Metrics of runs, as far as they were asked for; kept up to date while a run goes on. Questions of
 * one run follow each other: then each of its columns is whole up to the line that all are asked for
 * from the next time. */
const metricStore = {
  of: new Map(),

  table(run) {
    if (!this.of.has(run)) this.of.set(run, { generation: 0, lines: 0, rows: new Map(), steps: [], columns: {}, asked: {}, last: Promise.resolve() });
    return this.of.get(run);
  },

  /** What `ask` gives, once the questions of this run before it have ended. */
  next(run, ask) {
    const table = this.table(run), answer = table.last.then(ask);
    table.last = answer.catch(() => {});
    return answer;
  },

  /** Returns once all of `names` are there; asks for those that nobody has asked for yet. */
  async need(run, names) {
    const { asked } = this.table(run), missing = names.filter((name) => !(name in asked));
    if (missing.length) {
      const answer = this.next(run, async () => this.add(run, await source.metrics(run, missing, 0, 0)));
      answer.catch(() => missing.forEach((name) => delete asked[name])); // the next one asks again
      for (const name of missing) asked[name] = answer;
    }
    await Promise.all(names.map((name) => asked[name]));
  },

  /** Whether there was something new. */
  refresh(run) {
    return this.next(run, async () => {
      const table = this.table(run);
      const found = await source.metrics(run, Object.keys(table.columns), table.lines, table.generation);
      this.add(run, found);
      table.lines = found.lines;
      return found.steps.length > 0;
    });
  },

  add(run, found) {
    const table = this.table(run);
    if (found.generation !== table.generation) {
      const columns = Object.fromEntries(Object.keys(table.columns).map((name) => [name, []]));
      Object.assign(table, { generation: found.generation, lines: 0, rows: new Map(), steps: [], columns }); // the run went back: what was read is void
    }
    const rows = found.steps.map((step) => {
      if (!table.rows.has(step)) table.rows.set(step, table.steps.push(step) - 1);
      return table.rows.get(step);
    });
    for (const [name, values] of Object.entries(found.columns)) {
      const column = (table.columns[name] ||= []);
      values.forEach((value, i) => { column[rows[i]] = value === "NaN" ? NaN : value; });
    }
  },

  /** [[step, value], …] by step; steps without a number are left out. */
  series(run, name) { return this.line(run, name).filter(([, value]) => !Number.isNaN(value)); },

  /** The same with NaN where the metric was logged and was no finite number. */
  line(run, name) {
    const { steps, columns } = this.table(run), column = columns[name] || [];
    const found = [];
    for (let i = 0; i < steps.length; i++) if (column[i] !== null && column[i] !== undefined) found.push([steps[i], column[i]]);
    return found.sort((a, b) => a[0] - b[0]);
  },
};
