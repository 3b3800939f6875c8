"use strict";
// What a sample says: its prompt, its turns, and where the run has kept them, its tokens in colours.

// Of a token, by its place in the streams; null where there is nothing. `two`: around 0, in two hues.
const TOKEN_COLORS = {
  advantage: { label: "advantage", of: (t, i) => t.advantages?.[i] ?? null, two: true },
  logprob: { label: "surprise: −logprob (engine)", of: (t, i) => (t.versions[i] >= 0 ? -t.logprobs[i] : null) },
  difference: { label: "logprob: trainer − engine", of: (t, i) => (t.versions[i] >= 0 ? (t.differences?.[i] ?? null) : null), two: true },
  entropy: { label: "entropy (trainer)", of: (t, i) => (t.versions[i] >= 0 || t.weights?.[i] ? (t.entropy?.[i] ?? null) : null) },
  version: { label: "version", of: (t, i) => (t.versions[i] >= 0 ? t.versions[i] : null), from: "least" },
  loss: { label: "weight in the loss", of: (t, i) => t.weights?.[i] ?? null },
};

/** The kinds of colour that have something to show of these tokens. */
const colorsOf = (t) => Object.keys(TOKEN_COLORS).filter((kind) => t.pieces.some((_, i) => TOKEN_COLORS[kind].of(t, i) !== null));

/** Colours of all tokens, and the values that the ends of the scale stand for. */
function colored(t, kind) {
  const { of, two, from } = TOKEN_COLORS[kind], values = t.pieces.map((_, i) => of(t, i));
  const there = values.filter((value) => value !== null && Number.isFinite(value));
  const most = there.reduce((a, b) => Math.max(a, two ? Math.abs(b) : b), two ? 0 : -Infinity);
  const least = two ? -most : from ? there.reduce((a, b) => Math.min(a, b), Infinity) : 0;
  const shade = (value) => {
    if (value === null || !Number.isFinite(value)) return null;
    const share = two ? Math.abs(value) / (most || 1) : most > least ? (value - least) / (most - least) : 1;
    const hue = two ? (value < 0 ? "--minus" : "--plus") : "--heat";
    return share > 0.004 ? `rgba(var(${hue}), ${(0.07 + 0.55 * share).toFixed(3)})` : null;
  };
  return { shades: values.map(shade), least, most, two };
}

function scaleOf({ least, most, two }) {
  const canvas = h("canvas", { width: 110, height: 10 }), c = canvas.getContext("2d");
  for (let x = 0; x < 110; x++) {
    const at = two ? x / 54.5 - 1 : x / 109;
    c.fillStyle = `rgba(${css(two ? (at < 0 ? "--minus" : "--plus") : "--heat")}, ${0.07 + 0.55 * Math.abs(at)})`;
    c.fillRect(x, 0, 1, 10);
  }
  return h("span", { class: "scale" }, number(least), canvas, number(most));
}

/** Tokens `begin` to `end` of a sample as coloured text. */
function tokenText(t, begin, end, shades) {
  const box = h("div", { class: "said tokens" });
  for (let i = begin; i < end; i++) {
    const shown = h("span", { class: t.versions[i] < 0 && !t.weights?.[i] ? "given" : null, "data-token": i }, visible(t.pieces[i]));
    if (shades[i]) shown.style.background = shades[i];
    box.append(shown);
  }
  box.addEventListener("pointermove", (event) => {
    const i = event.target.dataset.token;
    if (i === undefined) tip();
    else tip(event, `token ${i}: ${JSON.stringify(t.pieces[i])}`, tokenFacts(t, Number(i)));
  });
  box.addEventListener("pointerleave", () => tip());
  if (t.experts) box.addEventListener("click", (event) => {
    const i = event.target.dataset.token;
    if (i !== undefined) fill(document.getElementById("experts"), expertsOf(t, Number(i)));
  });
  return box;
}

/** A token as it reads; what would be nothing to see gets a sign. */
const visible = (piece) => piece.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t") || "∅";

function tokenFacts(t, i) {
  const facts = [["id", String(t.ids[i])], ["version", t.versions[i] < 0 ? "not sampled" : String(t.versions[i])], ["advantage", number(t.advantages?.[i])], ["weight in the loss", number(t.weights?.[i])]];
  if (t.versions[i] >= 0) facts.push(["logprob, engine", number(t.logprobs[i])]);
  if (t.trainer_logprobs) facts.push(["logprob, trainer", number(t.trainer_logprobs[i])]);
  if (t.versions[i] >= 0 && t.differences) facts.push(["trainer − engine", number(t.differences[i])]);
  if (t.entropy) facts.push(["entropy, nats", number(t.entropy[i])]);
  return facts;
}

/** The experts that the engine sent a token to, by layer. */
function expertsOf(t, i) {
  const what = `token ${i}: ${JSON.stringify(t.pieces[i])}`, rows = t.experts[i];
  if (!rows) return h("p", { class: "dim" }, `${what} was not fed to the engine, or its routes are missing`);
  const row = (layer, k) => h("tr", null, h("th", null, `layer ${layer}`), h("td", { class: "value" }, rows[k] ? rows[k].join(", ") : "missing"));
  return [h("small", { class: "dim" }, `experts of ${what}`), h("table", null, h("tbody", null, t.layers.map(row)))];
}

/** The whole conversation of a sample. */
function conversation(sample) {
  const turns = messagesOf(sample.prompt).map((message) => turn(message.role, null, said(message.content), message));
  const t = sample.token_data, kinds = t ? colorsOf(t) : [];
  if (!kinds.length) {
    const messages = sample.messages?.length ? sample.messages : [{ role: "response", content: sample.response }];
    turns.push(messages.map((message) => turn(message.role === "response" ? "policy" : message.role, null, said(message.content), message)));
    if (source.live) turns.push(h("p", { class: "dim" }, "Single tokens are shown of runs with ", h("code", null, "logging.tokens=true"), "."));
    return turns;
  }
  const kind = kinds.includes(state.color) ? state.color : kinds[0], found = colored(t, kind);
  const choose = h("select", { id: "token-color", "aria-label": "colour of tokens", onchange: (event) => go({ color: event.target.value }, true) },
    kinds.map((one) => h("option", { value: one, selected: one === kind }, TOKEN_COLORS[one].label)));
  const parts = sample.segments || [{ author: "policy", tokens: t.pieces.length }];
  let at = 0;
  for (const { author, tokens } of parts) {
    turns.push(turn(author, `${number(tokens)} tokens`, tokenText(t, at, at + tokens, found.shades)));
    at += tokens;
  }
  const experts = t.experts && h("div", { id: "experts" }, h("p", { class: "dim" }, "Click a token for its experts."));
  return [h("div", { class: "tools" }, h("label", null, "tokens by", choose), scaleOf(found)), experts, turns];
}

const said = (content) => h("pre", null, textOf(content));

/** A turn with what a message has beside its text: tool calls, names, thoughts. */
function turn(author, note, content, message) {
  const more = Object.entries(message || {}).filter(([key]) => !["role", "content"].includes(key));
  return h("div", { class: `turn ${["policy", "assistant", "tool"].includes(author) ? author : ""}` }, h("small", null, author, note && ` · ${note}`), content,
    more.map(([key, value]) => h("pre", { class: "dim" }, `${key}: ${textOf(value)}`)));
}
