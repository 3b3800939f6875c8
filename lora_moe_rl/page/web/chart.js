"use strict";
// A line chart over steps on a canvas: a line a run, the same step marked in all charts.

const COLORS = ["#3b7fc4", "#d9822b", "#3f9a68", "#c9504a", "#8a63c9", "#2b98ab", "#c2589a", "#9a7d45"];
const DASHES = [[], [7, 3], [2, 2], [8, 2, 2, 2]]; // of the first runs, one for each colour, of the next ones, …
const MARGIN = { left: 52, right: 10, top: 8, bottom: 20 };
const CLICK = 8; // pixels; a pointer that goes further before its button is let go drags
const charts = new Set(); // those on the page
let marked = null; // the step under the pointer

class Chart {
  /** `series`: [{label, color, dash, points: [[step, value], …]}]. `pick(step)`, `zoom(from, to)`. */
  constructor(name, { log, toggleLog, pick, zoom }) {
    Object.assign(this, { name, log, pick, zoom, series: [], range: null, smooth: 0, pressed: null });
    this.canvas = h("canvas", {
      role: "img", "aria-label": name,
      onpointermove: (event) => this.point(event), onpointerleave: () => this.leave(),
      onpointerdown: (event) => this.press(event),
      onpointerup: (event) => this.release(event), onpointercancel: () => { this.pressed = null; },
    });
    this.above = h("canvas", { class: "above", "aria-hidden": "true" }); // the marked step: what lies below stays as it is
    this.last = h("output");
    this.button = h("button", { type: "button", id: `log-${name}`, title: "logarithmic scale", "aria-pressed": String(log), onclick: toggleLog }, "log");
    this.element = h("article", { class: "card chart", "data-metric": name }, h("header", null, h("b", { title: name }, name), this.last, this.button), h("div", { class: "plot" }, this.canvas, this.above));
    this.element.chart = this;
    charts.add(this);
  }

  show(series, { range, smooth, log }) {
    Object.assign(this, { series, range, smooth, log });
    this.button.setAttribute("aria-pressed", String(log));
    const ends = series.map(({ points }) => points.at(-1)).filter(Boolean);
    this.last.textContent = ends.length === 1 ? number(ends[0][1]) : "";
    this.lines = series.map(({ color, dash, points }) => {
      const inside = range ? points.filter(([step]) => step >= range[0] && step <= range[1]) : points;
      const shown = log ? inside.map(([step, value]) => [step, value > 0 ? value : NaN]) : inside;
      const lost = inside.filter(([, value]) => Number.isNaN(value)).map(([step]) => step);
      return { color, dash, points: shown, lost, smooth: smooth ? smoothed(shown, smooth) : null };
    });
    this.draw();
  }

  bounds() {
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const { points } of this.lines) {
      for (const [x, y] of points) {
        x0 = Math.min(x0, x); x1 = Math.max(x1, x);
        if (y < y0) y0 = y;
        if (y > y1) y1 = y;
      }
    }
    if (y0 > y1) return null;
    if (y0 === 0 && y1 === 0) y1 = 1;
    if (this.log) [y0, y1] = [Math.log10(y0), Math.log10(y1)];
    const room = (y1 - y0) * 0.06 || Math.abs(y1) * 0.1 || 0.5;
    return { x0, x1: x1 === x0 ? x0 + 1 : x1, y0: y0 - room, y1: y1 + room };
  }

  draw() {
    const { context: c, width, height } = canvasContext(this.canvas);
    if (!width) return;
    const box = (this.box = this.bounds()), ink = css("--dim");
    c.fillStyle = ink;
    if (!box) {
      c.fillText(this.log && this.series.some(({ points }) => points.length) ? "nothing above 0" : "no numbers yet", MARGIN.left, height / 2);
      return;
    }
    const right = width - MARGIN.right, bottom = height - MARGIN.bottom;
    this.toX = (x) => MARGIN.left + ((x - box.x0) / (box.x1 - box.x0)) * (right - MARGIN.left);
    this.toY = (y) => bottom - (((this.log ? Math.log10(y) : y) - box.y0) / (box.y1 - box.y0)) * (bottom - MARGIN.top);
    c.strokeStyle = css("--line");
    c.lineWidth = 1;
    c.textAlign = "right";
    for (const y of this.log ? logTicks(box.y0, box.y1) : ticks(box.y0, box.y1, 5)) {
      const at = Math.round(this.toY(y)) + 0.5;
      c.beginPath(); c.moveTo(MARGIN.left, at); c.lineTo(right, at); c.stroke();
      c.fillText(number(y), MARGIN.left - 6, at + 3.5);
    }
    c.textAlign = "center";
    for (const x of ticks(box.x0, box.x1, 5)) {
      if (Number.isInteger(x)) c.fillText(number(x), this.toX(x), height - 5);
    }
    for (const { color, dash, points, lost, smooth } of this.lines) {
      c.fillStyle = color;
      for (const step of lost) c.fillRect(this.toX(step) - 1, bottom - 5, 2, 5);
      c.setLineDash(dash);
      this.line(c, points, color, smooth ? 0.28 : 1);
      if (smooth) this.line(c, smooth, color, 1);
      c.setLineDash([]);
    }
    this.mark();
  }

  line(c, points, color, alpha) {
    c.globalAlpha = alpha;
    c.strokeStyle = c.fillStyle = color;
    c.lineWidth = 1.6;
    c.lineJoin = "round";
    for (const part of drawable(points, this.toX)) {
      c.beginPath();
      for (const [x, y] of part) c.lineTo(this.toX(x), this.toY(y));
      c.stroke();
      if (part.length < 3) for (const [x, y] of part) { c.beginPath(); c.arc(this.toX(x), this.toY(y), 2.5, 0, 7); c.fill(); }
    }
    c.globalAlpha = 1;
  }

  mark() {
    const { context: c, height } = canvasContext(this.above);
    if (marked === null || !this.box || marked < this.box.x0 || marked > this.box.x1) return;
    const at = Math.round(this.toX(marked)) + 0.5;
    c.strokeStyle = css("--faint");
    c.beginPath(); c.moveTo(at, MARGIN.top); c.lineTo(at, height - MARGIN.bottom); c.stroke();
    for (const { color, points } of this.lines) {
      const found = nearest(points, marked);
      if (!found || found[0] !== marked || Number.isNaN(found[1])) continue;
      c.fillStyle = color;
      c.beginPath(); c.arc(this.toX(found[0]), this.toY(found[1]), 3, 0, 7); c.fill();
    }
  }

  stepAt(event) {
    if (!this.box) return null;
    const left = this.canvas.getBoundingClientRect().left, wide = this.canvas.clientWidth - MARGIN.left - MARGIN.right;
    const x = this.box.x0 + ((event.clientX - left - MARGIN.left) / wide) * (this.box.x1 - this.box.x0);
    const found = this.lines.map(({ points }) => nearest(points, x)).filter(Boolean);
    return found.length ? found.sort((a, b) => Math.abs(a[0] - x) - Math.abs(b[0] - x))[0][0] : null;
  }

  point(event) {
    markStep(this.stepAt(event));
    if (marked === null) return;
    const rows = this.series.map(({ label, color, dash, points }) => {
      const found = nearest(points, marked);
      const value = found && found[0] === marked ? found[1] : null;
      return [label, Number.isNaN(value) ? "not a finite number" : number(value), color, dash];
    });
    tip(event, `step ${marked}`, rows);
  }

  leave() {
    markStep(null);
    tip();
  }

  /** From here on the pointer is this chart's, also beside it, until the button is let go. */
  press(event) {
    const step = this.stepAt(event);
    if (event.button !== 0 || step === null) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.pressed = { at: event.clientX, step };
  }

  release(event) {
    if (!this.pressed) return;
    const { at, step } = this.pressed, to = this.stepAt(event);
    this.pressed = null;
    if (Math.abs(event.clientX - at) <= CLICK) this.pick(step);
    else if (to !== step) this.zoom(Math.min(step, to), Math.max(step, to));
  }
}

function markStep(step) {
  if (step === marked) return;
  marked = step;
  requestAnimationFrame(() => {
    for (const chart of charts) if (chart.seen && chart.lines) chart.mark();
  });
}

/** The point whose step is nearest to `x`; points are sorted by step. */
function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= x) low = middle;
    else high = middle;
  }
  const [a, b] = [points[low], points[high]];
  return a && b && Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a;
}

/** What is to be drawn of a line: its parts between points without a number, of each column of
 * pixels only the lowest and the highest point. */
function drawable(points, toX) {
  const parts = [[]];
  let column = null, low = null, high = null;
  const put = () => {
    if (low) parts.at(-1).push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
    low = high = null;
  };
  for (const point of points) {
    const [x, y] = point, at = Math.floor(toX(x)), lost = Number.isNaN(y);
    if (lost || at !== column) put();
    column = at;
    if (lost && parts.at(-1).length) parts.push([]);
    if (lost) continue;
    if (!low || y < low[1]) low = point;
    if (!high || y > high[1]) high = point;
  }
  put();
  return parts;
}

/** A running mean in which the past weighs `share`, as TensorBoard smooths: without its pull to 0
 * at the beginning. A point without a number has no share in it. */
function smoothed(points, share) {
  let sum = 0, weight = 0;
  return points.map(([x, y]) => {
    if (Number.isNaN(y)) return [x, y];
    sum = sum * share + (1 - share) * y;
    weight = weight * share + (1 - share);
    return [x, sum / weight];
  });
}

/** Round numbers between two, about `count` of them. */
function ticks(from, to, count) {
  const raw = (to - from) / count, unit = 10 ** Math.floor(Math.log10(raw));
  const step = unit * ([1, 2, 5].find((one) => one * unit >= raw) || 10);
  const found = [];
  for (let at = Math.ceil(from / step); at * step <= to; at++) found.push(Number((at * step).toPrecision(12)));
  return found;
}

/** Powers of ten between two, at most six; where there are fewer than two, round numbers. */
function logTicks(from, to) {
  const powers = [], every = Math.max(1, Math.ceil((to - from) / 5));
  for (let at = Math.ceil(from); at <= to; at += every) powers.push(Number(`1e${at}`));
  return powers.length > 1 ? powers : ticks(10 ** from, 10 ** to, 3).filter((one) => one > 0);
}
