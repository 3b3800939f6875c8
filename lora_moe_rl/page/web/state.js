"use strict";
// What is shown stands in the address after the #, so that a link shows it again.

const DEFAULTS = {
  view: "curves", runs: "", run: "", // views of one run: that one of the runs that are chosen
  q: "", smooth: "0", log: "", x: "", // curves: search, smoothing, charts with the scale changed, steps from-to
  step_from: "", step_to: "", drawn: "", reward_from: "", reward_to: "", finish: "", data_set: "", text: "",
  order: "newest", offset: "0", n: "", color: "advantage", // samples
  step: "", layer: "", // routes: of which step, and which layer by step; none: the newest, the first
  at: "", count: "6", // timeline: the last step shown, and how many
  differ: "1", // settings
};
const FILTERS = ["step_from", "step_to", "drawn", "reward_from", "reward_to", "finish", "data_set", "text", "order"];

let state = readState();

function readState() {
  const found = { ...DEFAULTS };
  for (const [key, value] of new URLSearchParams(location.hash.slice(1))) if (key in DEFAULTS) found[key] = value;
  return found;
}

/** The address of this state with `changes`. */
function address(changes) {
  const next = { ...state, ...changes }, query = new URLSearchParams();
  for (const [key, value] of Object.entries(next)) if (value !== DEFAULTS[key]) query.set(key, value);
  return `#${query}`;
}

/** Goes to this state with `changes`; with `quiet`, without a new entry in the browser's history. */
function go(changes, quiet) {
  const target = address(changes);
  if (quiet) history.replaceState(null, "", target);
  else history.pushState(null, "", target);
  state = readState();
  render();
}

addEventListener("popstate", () => {
  state = readState();
  render();
});

/** A list in the address; what is not encoded as `joined` does it stands for itself. */
function listed(text) {
  const decoded = (one) => { try { return decodeURIComponent(one); } catch { return one; } };
  return text.split(",").filter(Boolean).map(decoded);
}
const joined = (list) => list.map(encodeURIComponent).join(",");
