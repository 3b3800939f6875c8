"use strict";
// Small helpers. All text that comes from a run goes in as a text node: nothing is parsed as HTML.

/** An element: `h("p", {class: "dim", onclick: f}, "text", child, …)`. */
function h(tag, given, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(given || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [k, v] of Object.entries(value)) element.style.setProperty(k, v);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Puts `children` in the place of what an element has. What had the focus by its id has it again. */
function fill(element, ...children) {
  const focused = element.contains(document.activeElement) && document.activeElement.id;
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  const again = focused && byId(focused);
  if (again && again !== document.activeElement) again.focus({ preventScroll: true });
  return element;
}

/** The sign of a line of this colour; `dash` as of a canvas, empty where the line is whole. */
const swatch = (color, dash = []) => h("i", { class: dash.length ? "swatch dashed" : "swatch", style: dash.length ? { "--run": color } : { background: color } });

const byId = (id) => document.getElementById(id);

/** A number as one reads it: four figures; very small and very large ones with an exponent. */
function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en-US");
  if (size < 1e-3 || size >= 1e7) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
  return value.toLocaleString("en-US", { maximumSignificantDigits: size >= 1000 ? 6 : 4 });
}

/** Calls `call` once nothing has asked for it for `milliseconds`. */
function settled(call, milliseconds) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...given), milliseconds);
  };
}

/** Shows rows of [label, value, colour, dash] beside the pointer; none: hides them. */
function tip(event, title, rows) {
  const box = byId("tip");
  box.hidden = !rows;
  if (!rows) return;
  const line = ([label, value, color, dash]) =>
    h("div", null, h("span", null, color && swatch(color, dash), label), h("span", null, value));
  fill(box, title && h("b", null, title), rows.map(line));
  const { width, height } = box.getBoundingClientRect();
  const left = event.clientX + 16 + width > innerWidth ? event.clientX - 16 - width : event.clientX + 16;
  box.style.left = `${Math.max(4, left)}px`;
  box.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 8))}px`;
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The drawing context of a canvas of the size that it has on the page, in CSS pixels. */
function canvasContext(canvas) {
  const ratio = devicePixelRatio || 1, { width, height } = canvas.getBoundingClientRect();
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = '11px system-ui, "DejaVu Sans", sans-serif';
  return { context, width, height };
}
