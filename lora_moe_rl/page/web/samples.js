"use strict";
// Samples of one run: filters, a list, and beside it one sample with its group.

const PER_PAGE = 50;
const ORDER_LABELS = { newest: "newest first", oldest: "oldest first", "-reward": "highest reward", reward: "lowest reward", "-advantage": "highest advantage", advantage: "lowest advantage", "-tokens": "longest" };

const samplesView = {
  mount(root) {
    this.inputs = {};
    const slow = settled((key, value) => go({ [key]: value, offset: "0" }, true), 40);
    const input = (key, type, label, width) => {
      const given = { type, placeholder: label, "aria-label": label, id: `filter-${key}`, step: "any", style: width && { width }, oninput: (event) => slow(key, event.target.value) };
      return (this.inputs[key] = h("input", given));
    };
    const select = (key, label) => (this.inputs[key] = h("select", { id: `filter-${key}`, "aria-label": label, onchange: (event) => go({ [key]: event.target.value, offset: "0" }, true) }));
    this.runBox = h("span");
    const steps = h("label", null, "steps", input("step_from", "number", "from", "70px"), "–", input("step_to", "number", "to", "70px"));
    const rewards = h("label", null, "reward", input("reward_from", "number", "from", "66px"), "–", input("reward_to", "number", "to", "66px"));
    const text = input("text", "search", "text of prompt or answer", "210px");
    select("order", "order");
    fill(this.inputs.order, Object.entries(ORDER_LABELS).map(([value, label]) => h("option", { value }, label)));
    this.clear = h("button", { type: "button", onclick: () => go({ ...cleared(), order: state.order }) }, "clear");
    this.pager = h("div", { class: "pager" });
    this.list = h("div", { class: "card list", role: "listbox", "aria-label": "samples", tabIndex: 0, onkeydown: (event) => this.key(event) });
    this.detail = h("div", { class: "card detail", id: "sample" });
    fill(root, h("div", { class: "tools" }, this.runBox, text, steps, rewards, input("drawn", "number", "prompt #", "104px"), select("finish", "how it ended"), select("data_set", "data set"), this.inputs.order, this.clear),
      h("div", { class: "samples" }, h("div", null, this.pager, this.list), this.detail));
  },

  async update(newest) {
    const run = focusedRun();
    fill(this.runBox, runChoice());
    this.runBox.hidden = !this.runBox.firstChild;
    for (const [key, element] of Object.entries(this.inputs)) if (document.activeElement !== element) element.value = state[key];
    this.clear.hidden = FILTERS.every((key) => key === "order" || !state[key]);
    if (!run) return void fill(this.list, h("p", { class: "empty" }, "Choose a run."));
    const choice = Object.fromEntries(FILTERS.map((key) => [key, state[key]]));
    const waiting = setTimeout(() => newest() && fill(this.pager, "reading samples …"), 250);
    const found = await source.samples(run, choice, Number(state.offset), PER_PAGE).finally(() => clearTimeout(waiting));
    if (!newest()) return;
    this.found = found;
    this.options("finish", "any end", found.finish_reasons);
    this.options("data_set", "any data set", found.data_sets);
    this.page(found);
    fill(this.list, found.list.map((one) => this.item(one)));
    if (!found.list.length) fill(this.list, h("p", { class: "empty", style: { "padding-left": "14px" } }, found.samples ? "No sample fits." : "There are no samples yet."));
    const number = state.n || found.list[0]?.number;
    if (number === undefined) return void fill(this.detail, h("p", { class: "empty" }, "Nothing to show."));
    await this.show(run, number, newest);
  },

  options(key, any, words) {
    const element = this.inputs[key];
    element.hidden = words.length < 2 && !state[key];
    fill(element, h("option", { value: "" }, any), words.map((word) => h("option", { value: word }, word)));
    element.value = state[key];
  },

  page({ samples, chosen, of }) {
    const offset = Number(state.offset), last = Math.min(offset + PER_PAGE, chosen);
    const all = chosen === samples ? "" : ` (of ${number(samples)})`, left = of > samples ? ` · this file holds ${number(samples)} of ${number(of)}` : "";
    fill(this.pager, h("span", { id: "count" }, chosen ? `${number(offset + 1)}–${number(last)} of ${number(chosen)}${all}${left}` : "none"), h("span", { class: "space" }),
      h("button", { type: "button", id: "page-back", disabled: !offset, onclick: () => go({ offset: String(Math.max(0, offset - PER_PAGE)), n: "" }) }, "‹ back"),
      h("button", { type: "button", id: "page-next", disabled: last >= chosen, onclick: () => go({ offset: String(offset + PER_PAGE), n: "" }) }, "next ›"));
  },

  item(one) {
    const facts = [`step ${one.step}`, `#${one.drawn}`, one.data_set, `${number(one.tokens)} tokens`, one.turns > 1 && `${one.turns} turns`, one.finish_reason !== "stop" && one.finish_reason].filter(Boolean);
    return h("div", { class: "item", role: "option", "data-number": one.number, onclick: () => go({ n: String(one.number) }, true) },
      h("small", null, facts.join(" · ")), h("b", { class: "num" }, rewardText(one)),
      h("div", { class: "text" }, h("span", { class: "dim" }, one.prompt, " "), one.response));
  },

  async show(run, place, newest) {
    const sample = await source.sample(run, place);
    if (!newest()) return;
    for (const item of this.list.children) item.setAttribute("aria-selected", String(item.dataset.number === String(place)));
    const group = await source.samples(run, { ...Object.fromEntries(FILTERS.map((key) => [key, ""])), step_from: String(sample.step), step_to: String(sample.step), drawn: String(sample.drawn), order: "oldest" }, 0, 200);
    if (!newest()) return;
    const kept = this.detail.dataset.number === String(place) ? this.detail.scrollTop : 0;
    this.detail.dataset.number = place;
    fill(this.detail, facts(sample), parts(sample), this.strip(sample, group.list), conversation(sample));
    this.detail.scrollTop = kept;
  },

  strip(sample, group) {
    if (group.length < 2) return null;
    const one = (other) => h("button", { type: "button", id: `group-${other.number}`, "aria-pressed": String(other.number === sample.number), title: `sample ${other.sample}, advantage ${number(other.advantage)}`, onclick: () => go({ n: String(other.number) }, true) }, rewardText(other));
    return [h("small", { class: "dim" }, `rewards of this group's ${group.length} samples`), h("div", { class: "strip", id: "group" }, group.map(one))];
  },

  key(event) {
    const by = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    if (!by || !this.found) return;
    event.preventDefault();
    const at = this.found.list.findIndex((one) => String(one.number) === (state.n || this.detail.dataset.number));
    const next = this.found.list[Math.max(0, Math.min(this.found.list.length - 1, at + by))];
    if (next) go({ n: String(next.number) }, true);
    this.list.querySelector('[aria-selected="true"]')?.scrollIntoView({ block: "nearest" });
  },
};

const rewardText = (one) => (one.failure ? "failed" : number(one.reward));

function facts(sample) {
  const fact = (label, value, kind) => h("div", null, h("small", null, label), h("b", { class: kind }, value));
  const versions = sample.versions || [], oldest = versions.at(0), newest = versions.at(-1);
  return h("div", { class: "facts" },
    fact("reward", rewardText(sample), sample.failure && "bad"),
    fact("advantage", number(sample.advantage), sample.advantage > 0 ? "good" : sample.advantage < 0 ? "bad" : null),
    fact("step", number(sample.step)), fact("prompt", `#${sample.drawn}`), sample.row !== undefined && fact("row", sample.row), fact("sample", sample.sample), fact("tokens", number(sample.tokens)),
    versions.length && fact(oldest === newest ? "version" : "versions", oldest === newest ? oldest : `${oldest}–${newest}`),
    fact("end", sample.finish_reason, sample.finish_reason === "stop" ? null : "bad"), sample.data_set && fact("data set", sample.data_set));
}

/** What several reward functions gave, what they have logged, and why one failed. */
function parts(sample) {
  const rows = [...Object.entries(sample.rewards || {}).map(([name, value]) => [`reward ${name}`, number(value)]),
    ...Object.entries(sample.extra || {}).map(([name, value]) => [name, typeof value === "number" ? number(value) : textOf(value)]),
    ...(sample.failure ? [["failure", sample.failure]] : [])];
  return rows.length ? h("table", { style: { "margin-bottom": "10px" } }, h("tbody", null, rows.map(([name, value]) => h("tr", null, h("th", null, name), h("td", { class: "value" }, value))))) : null;
}
