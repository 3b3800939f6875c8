"use strict";
// Who did what when, in some steps of one run; grey: it waits.

const WORK = { sample: "#3b7fc4", evaluate: "#8a63c9", teach: "#2f9aa8", reward: "#3f9a68", update: "#d9822b", publish: "#c9504a", checkpoint: "#767676" };
const LANE = 34;

const timelineView = {
  mount(root) {
    const button = (id, text) => h("button", { type: "button", id, onclick: () => this.go(id) }, text);
    this.run = h("span");
    this.earlier = button("earlier", "‹ earlier");
    this.later = button("later", "later ›");
    this.count = h("input", { type: "number", min: "1", max: "50", style: { width: "70px" }, "aria-label": "number of steps", onchange: (event) => go({ count: event.target.value || "6" }, true) });
    this.trace = h("a", { download: "timeline.trace.json" }, "trace of the last steps, for Perfetto");
    this.tools = h("div", { class: "tools" }, this.run, source.live && [this.earlier, this.later, h("label", null, "steps", this.count)],
      Object.entries(WORK).map(([what, color]) => h("span", { class: "dim" }, swatch(color), what)), source.live && this.trace);
    this.canvas = h("canvas", { role: "img", "aria-label": "timeline", onpointermove: (event) => this.point(event), onpointerleave: () => tip() });
    this.box = h("article", { class: "card heat", id: "timeline" }, this.canvas);
    this.none = h("p", { class: "empty" }, "This run has no timeline.");
    fill(root, this.tools, this.box, this.none);
  },

  async update(newest) {
    const run = focusedRun();
    if (!run) return;
    const { first, newest: end, steps } = await source.timeline(run, state.at, state.count);
    if (!newest()) return;
    this.box.hidden = !steps.length;
    this.none.hidden = steps.length > 0;
    const last = steps.at(-1)?.step ?? 0;
    Object.assign(this, { steps, first, end, last });
    fill(this.run, runChoice());
    this.earlier.disabled = !steps.length || steps[0].step <= first;
    this.later.disabled = last >= end;
    if (document.activeElement !== this.count) this.count.value = state.count;
    this.trace.href = source.traceLink(run);
    if (steps.length) this.draw();
  },

  go(where) {
    const at = this.last + (where === "later" ? 1 : -1) * Number(state.count);
    go({ at: at >= this.end ? "" : String(Math.max(at, this.first)) }, true);
  },

  rows() {
    const found = new Set(this.steps.flatMap(({ spans }) => spans.map(([who]) => who)));
    const engines = [...found].filter((who) => who.startsWith("engine-")).sort((a, b) => a.length - b.length || (a < b ? -1 : 1));
    return ["feed", ...engines, "rewards", "trainer", "publish"].filter((who) => found.has(who));
  },

  draw() {
    const rows = this.rows();
    this.canvas.style.height = `${rows.length * LANE + 40}px`;
    const { context: c, width } = canvasContext(this.canvas), left = 78, begin = this.steps[0].begin, end = this.steps.at(-1).end;
    const toX = (seconds) => left + ((seconds - begin) / (end - begin)) * (width - left);
    this.back = (x) => begin + ((x - left) / (width - left)) * (end - begin);
    const bars = (row, spans, color) => spans.forEach(([, , , from, seconds]) => {
      const x = Math.max(toX(from), left);
      c.fillStyle = color;
      c.fillRect(x, 22 + row * LANE, Math.max(toX(from + seconds) - x, 0.7), LANE - 8);
    });
    rows.forEach((who, row) => {
      const spans = this.steps.flatMap((step) => step.spans.filter((span) => span[0] === who));
      const alpha = Math.max(0.12, 1 / Math.max(1, Math.sqrt(spans.length / this.steps.length)));
      c.globalAlpha = 1;
      bars(row, spans.filter(([, what]) => what.startsWith("wait")), css("--soft"));
      for (const [what, color] of Object.entries(WORK)) {
        c.globalAlpha = ["sample", "evaluate", "teach", "reward"].includes(what) ? alpha : 1;
        bars(row, spans.filter((span) => span[1] === what), color);
      }
      c.globalAlpha = 1;
      c.fillStyle = css("--dim");
      c.textAlign = "right";
      c.fillText(who, left - 10, 22 + row * LANE + 17);
    });
    this.frame(c, toX, rows.length, left, end - begin);
  },

  frame(c, toX, rows, left, seconds) {
    c.textAlign = "center";
    c.fillStyle = css("--dim");
    const bottom = 22 + rows * LANE, begin = this.steps[0].begin;
    for (const step of this.steps) {
      const x = Math.round(toX(step.end)) - 0.5;
      c.strokeStyle = css("--faint");
      c.setLineDash([2, 3]);
      c.beginPath(); c.moveTo(x, 4); c.lineTo(x, bottom); c.stroke();
      c.setLineDash([]);
      c.fillText(`step ${step.step}`, Math.max((toX(step.begin) + x) / 2, left + 20), 13);
    }
    for (const at of ticks(0, seconds, 8)) c.fillText(`${number(at)} s`, toX(begin + at), bottom + 14);
  },

  point(event) {
    const box = this.canvas.getBoundingClientRect(), who = this.rows()[Math.floor((event.clientY - box.top - 22) / LANE)];
    const at = this.back?.(event.clientX - box.left);
    const found = this.steps.flatMap((step) => step.spans).filter(([one, , , from, seconds]) => one === who && from <= at && at <= from + seconds);
    const names = { sample: "prompt", evaluate: "prompt", teach: "prompt", reward: "prompt", update: "step", checkpoint: "step", publish: "version" };
    if (!found.length) return tip();
    const rows = found.slice(0, 8).map(([, what, nr, , seconds]) => [names[what] ? `${what}: ${names[what]} ${nr}` : what, `${seconds.toFixed(3)} s`]);
    tip(event, who, found.length > 8 ? [...rows, [`and ${found.length - 8} more`, ""]] : rows);
  },
};
