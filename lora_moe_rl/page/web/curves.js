"use strict";
// Runs side by side: curves of what one looks at first, or of every metric that a search finds.

const sum = (values) => values.reduce((a, b) => a + b, 0);
const mean = (values) => sum(values) / values.length;
const ends = (values) => (values.length ? `${number(mean(values.slice(0, 5)))} → ${number(mean(values.slice(-5)))}` : "–");
const largest = (values) => (values.length ? number(values.reduce((a, b) => Math.max(a, b))) : "–");
const least = (values) => (values.length ? number(values.reduce((a, b) => Math.min(a, b))) : "–");
const middle = (values) => (values.length ? number(values.toSorted((a, b) => a - b)[values.length >> 1]) : "–");
const total = (values) => (values.length ? number(sum(values)) : "–");

const SECTIONS = [
  ["Learning", ["reward/mean", "policy/entropy", "rollout/response_length", "rollout/truncated", "optim/grad_norm", "optim/skipped", "critic/skipped", "loss/policy",
    "loss/nll", "loss/dpo", "rewards/margins", "rewards/accuracies", "data/answer_length", "teacher/reverse_kl", "teacher/taught"]],
  ["Evaluation", [/^eval\/.*\/(avg|(pass|maj)@\d+|nll|loss|margins|accuracies)$/]],
  ["Trainer and engines as one policy", ["mismatch/kl", "mismatch/max_abs_logprob_diff", "replay/coverage", "replay/disagreement"]],
  ["Routes", ["experts/busiest", "experts/entropy", "experts/idle"]],
  ["Ages", ["rollout/age_mean", "rollout/age_oldest", "rollout/stale"]],
  ["Time", ["time/step", "time/rollout", "time/train", "time/refit", "rollout/tokens_per_second", "data/tokens_per_second",
    "idle/trainer", "idle/engines"]],
  ["Refit", ["refit/seconds", "refit/bytes", "refit/max_diff", "refit/lost"]],
];
const LOGARITHMIC = /^mismatch\/(kl(_age_\d+|_reverse)?|max_abs_logprob_diff|mean_abs_logprob_diff)$/;
const ABOVE_0 = ["optim/skipped", "critic/skipped"]; // of no interest as long as they are 0
const SUMMARY = [["reward/mean", "reward", ends], ["loss/nll", "loss", ends], ["loss/dpo", "loss", ends], ["optim/skipped", "updates skipped", total], ["mismatch/kl", "mismatch KL (max)", largest],
  ["replay/coverage", "replayed (min)", least], ["rollout/tokens_per_second", "tokens/s", middle], ["time/step", "step s", middle]];
const FIRST = [...new Set([...SUMMARY.map(([name]) => name), ...ABOVE_0])]; // what is asked for before anything is shown
const MOST_CHARTS = 120;

const curves = {
  mount(root) {
    const slow = settled((q) => go({ q }, true), 120);
    this.search = h("input", { type: "search", id: "metric-search", placeholder: "any metric: kl, time, reward …", "aria-label": "search metrics", oninput: (event) => slow(event.target.value) });
    this.smooth = h("input", { type: "range", min: "0", max: "0.98", step: "0.02", "aria-label": "smoothing", oninput: (event) => go({ smooth: event.target.value }, true) });
    this.reset = h("button", { type: "button", onclick: () => go({ x: "" }) }, "all steps");
    this.hint = h("span", { class: "dim" }, "click: samples of that step · drag: zoom · Esc: all steps");
    this.table = h("div", { class: "card scroll", id: "summary" });
    this.charts = h("div");
    this.drawn = "";
    this.watch = new IntersectionObserver((entries) => this.seen(entries), { rootMargin: "300px" });
    fill(root, this.table, h("div", { class: "tools", style: { "margin-top": "16px" } }, this.search, h("label", null, "smooth", this.smooth), this.reset, this.hint), this.charts);
  },

  async update(newest) {
    if (document.activeElement !== this.search) this.search.value = state.q;
    this.smooth.value = state.smooth;
    this.reset.hidden = !state.x;
    const runs = chosenRuns(), [names] = await Promise.all([namesOf(runs), ...runs.map((run) => metricStore.need(run, FIRST))]);
    if (!newest()) return;
    const sections = sectionsOf(names, runs), wanted = JSON.stringify([sections, runs]);
    if (wanted !== this.drawn) {
      this.drawn = wanted;
      this.build(sections, runs);
    } else for (const chart of charts) this.paint(chart);
    this.summary(runs);
  },

  build(sections, runs) {
    this.watch.disconnect();
    charts.clear();
    const card = (name) => new Chart(name, {
      log: isLog(name), toggleLog: () => go({ log: toggled(state.log, name) }, true),
      pick: (step) => go({ view: "samples", ...cleared(), step_from: String(step), step_to: String(step) }),
      zoom: (from, to) => go({ x: `${from}-${to}` }),
    }).element;
    fill(this.charts, sections.map(([title, names]) => [h("h2", null, title), h("div", { class: "grid" }, names.map(card))]));
    if (!sections.length) fill(this.charts, h("p", { class: "empty" }, state.q ? `No metric of these runs has ${state.q} in its name.` : runs.length ? "No numbers yet: the first step is under way." : "Choose a run."));
    for (const chart of charts) this.watch.observe(chart.element);
  },

  /** Charts are filled once they come into sight, all that come at once by one question a run. */
  async seen(entries) {
    const found = entries.map(({ target, isIntersecting }) => { target.chart.seen = isIntersecting; return isIntersecting && target.chart; }).filter(Boolean);
    if (!found.length) return;
    await attempt(() => Promise.all(chosenRuns().map((run) => metricStore.need(run, found.map(({ name }) => name)))));
    for (const chart of found) this.paint(chart);
  },

  paint(chart) {
    if (!chart.seen) return;
    const series = chosenRuns().map((run) => ({ label: run, color: colorOf(run), dash: dashOf(run), points: metricStore.line(run, chart.name) }));
    const range = state.x ? state.x.split("-").map(Number) : null;
    chart.show(series.filter(({ points }) => points.length), { range, smooth: Number(state.smooth), log: isLog(chart.name) });
  },

  summary(runs) {
    const shown = SUMMARY.filter(([name]) => worthIt(name, runs) && runs.some((run) => metricStore.series(run, name).length));
    const row = (run) => {
      const about = state_runs.find(({ name }) => name === run);
      return h("tr", null, h("td", null, swatch(colorOf(run), dashOf(run)), run), h("td", { class: "dim" }, about.algorithm), h("td", { class: "num" }, `${about.step}/${about.steps ?? "?"}`),
        shown.map(([name, , how]) => h("td", { class: "num" }, how(metricStore.series(run, name).map(([, value]) => value)))));
    };
    this.table.hidden = !runs.length;
    fill(this.table, h("table", null, h("thead", null, h("tr", null, h("th", null, "run"), h("th", null, "algorithm"), h("th", { class: "num" }, "step"), shown.map(([, label]) => h("th", { class: "num" }, label)))), h("tbody", null, runs.map(row))));
  },
};

addEventListener("keydown", (event) => {
  if (event.key === "Escape" && state.view === "curves" && state.x && !event.target.matches("[type=search]")) go({ x: "" });
});

const worthIt = (name, runs) => !ABOVE_0.includes(name) || runs.some((run) => metricStore.series(run, name).some(([, value]) => value > 0));
const isLog = (name) => LOGARITHMIC.test(name) !== listed(state.log).includes(name);
const toggled = (list, name) => joined(listed(list).includes(name) ? listed(list).filter((one) => one !== name) : [...listed(list), name]);
const cleared = () => Object.fromEntries([...FILTERS, "offset", "n"].map((key) => [key, DEFAULTS[key]]));

/** [[title, metrics]]: the first look, or all metrics whose names hold every word of the search. */
function sectionsOf(names, runs) {
  const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) {
    const of = (wanted) => (typeof wanted === "string" ? names.filter((name) => name === wanted) : names.filter((name) => wanted.test(name)));
    return SECTIONS.map(([title, wanted]) => [title, wanted.flatMap(of).filter((name) => worthIt(name, runs))]).filter(([, found]) => found.length);
  }
  const found = names.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
  const title = found.length > MOST_CHARTS ? `The first ${MOST_CHARTS} of ${found.length} metrics` : `${found.length} metrics`;
  return found.length ? [[title, found.slice(0, MOST_CHARTS)]] : [];
}

async function namesOf(runs) {
  const every = await Promise.all(runs.map((run) => source.names(run)));
  return [...new Set(every.flatMap(({ names }) => names))].sort();
}
